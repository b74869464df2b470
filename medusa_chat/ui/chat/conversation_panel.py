"""The list of conversations beside the chat, its heading, and which of their events does what."""

from collections.abc import Callable, Mapping
from typing import Any

import gradio as gr

from medusa_chat.errors import MedusaChatError
from medusa_chat.ui.access.guard import MAX_FILE, is_guest
from medusa_chat.ui.access.notices import warn
from medusa_chat.ui.chat.browser_tab import Tab
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.chat.conversation_events import ConversationEvents
from medusa_chat.ui.chat.presets import chosen, files_line, offered
from medusa_chat.ui.chat.settings_panel import SettingsPanel
from medusa_chat.ui.chat.view import View
from medusa_chat.ui.page.html_blocks import AT_ONCE, page, script_block

HEADING = (
    '<button type="button" id="list-button" class="tool" title="Conversations" '
    'aria-label="Conversations" aria-controls="conversations"><svg viewBox="0 0 24 24" '
    'aria-hidden="true"><path d="M4 6h16M4 12h16M4 18h10"/></svg></button>'
    '<h2 id="chat-title" dir="auto"></h2>'
)
SYSTEM_OPENER = (
    '<button type="button" id="system-button" class="tool" aria-expanded="false" '
    'aria-controls="system-box" title="Goes before every message of this conversation">'
    'System<span class="long">&nbsp;prompt</span></button>'
)
# What the browser knows: which conversation the address names, this tab showed, and this browser
# last; and its settings. The last input is whether Vanilla is on.
# Gradio's own BrowserState is not used: on a slow machine it may not have read the storage when the
# page's load event posts its value.
FROM_BROWSER = """async (tab, known, settings, vanilla) => {
  const { stored } = await import('medusa/page.js');
  const read = (place, name) => stored(place, name) || '';
  const kept = {
    link: location.hash.slice(1),
    tab: read('sessionStorage', 'medusa-chat'),
    last: read('localStorage', 'medusa-chat'),
  };
  return [tab, JSON.stringify(kept), read('localStorage', 'medusa-chat-settings'), vanilla];
}"""
LIST_EVENTS = (
    *("open_conversation", "search_conversations", "rename_conversation", "save_conversation"),
    *("delete_conversation", "restore_conversation", "pin_conversation", "show_bin", "empty_bin"),
)
# A second click before the first was answered must not be dropped.
EACH: dict[str, Any] = {**AT_ONCE, "trigger_mode": "multiple"}
Posted = Mapping[gr.components.Component, Any]


def build_list() -> dict[str, Any]:
    """Put the list of conversations into the gr.Row that is open."""
    with gr.Column(elem_id="side", scale=0, min_width=0):
        rows = script_block("conversations", events=LIST_EVENTS, MAX_FILE=MAX_FILE)
        return {"conversations": rows, "saved": script_block("saved")}


def build_heading() -> dict[str, Any]:
    """Put what stands above the list into the gr.Row that is open."""
    with gr.Row(elem_id="heading"):
        heading = gr.HTML(HEADING, elem_id="heading-title", js_on_load=None)
        clear = gr.Button("New chat", elem_id="clear", size="sm")
        temporary = gr.Button("Temporary chat", elem_id="temporary", size="sm")
        return {"heading": heading, "clear": clear, "temporary": temporary}


def build_system() -> gr.Textbox:
    """Put the system prompt, which its button opens, into the gr.Column that is open."""
    with gr.Column(elem_id="system-box"):
        return gr.Textbox("", label="System prompt", lines=3, max_lines=8, elem_id="system")


def connect_conversations(
    controller: ConversationEvents, tab: gr.State, parts: dict[str, Any], settings: SettingsPanel
) -> None:
    """Connect the events of the list, and of a tab that opens."""
    view = [parts[name] for name in View._fields]
    everything = [*view, *settings.outputs]
    vanilla = settings.components["vanilla"]

    def come(tab: Tab, known: object, kept: object, is_plain: object, request: gr.Request) -> Any:
        view = controller.attach(tab, known, request)
        chat = controller.session_of(tab)
        own, by = chat.settings or settings.anew(kept), is_guest(request)
        if chat.is_empty:
            own = begun(chat, settings.first(own), by)
        files = files_line(str(own.get("preset", "")), by)
        tab.list_version = -1  # the list's line names the preset
        view = view.then(controller.refresh(tab))
        return [*view, *settings.shown(is_plain, own, offered(by)), files]

    def begun(chat: ChatSession, own: dict[str, Any], is_for_guest: bool) -> dict[str, Any]:
        """The settings of an empty conversation, which begins with the system prompt of their
        preset; without the preset where that is gone."""
        if name := own.get("preset"):
            try:
                chat.set_system(chosen(name, is_for_guest).system)
            except MedusaChatError as error:
                warn(str(error))
                own = {**own, "preset": ""}
        chat.set_settings(own)
        return own

    def opening(act: Callable[[Tab, dict[str, Any]], View]) -> Callable[..., list[Any]]:
        def handle(posted: Posted, request: gr.Request) -> list[Any]:
            view = act(posted[tab], own := settings.anew(settings.kept(posted)))
            own = begun(controller.session_of(posted[tab]), own, is_guest(request))
            posted[tab].list_version = -1  # the list's line names the preset
            view = view.then(controller.refresh(posted[tab]))
            return [*view, *settings.shown(posted[vanilla], own)]

        return handle

    def follow_model(tab: Tab, is_plain: object) -> list[Any]:
        """A conversation that was opened before its model was there begins with its defaults."""
        chat, model = controller.session_of(tab), settings.model()
        if model is None or not chat.is_empty or chat.settings.get("model") == model.name:
            return [*(gr.skip() for _ in settings.outputs[:-1]), settings.words]
        chat.set_settings(settings.first(chat.settings))
        return settings.shown(is_plain, chat.settings)

    asked = [tab, parts["next"], parts["heading"], vanilla]
    come_to = [*everything, settings.presets.files]
    page().load(come, asked, come_to, js=FROM_BROWSER, **AT_ONCE)
    parts["next"].refresh(follow_model, [tab, vanilla], settings.outputs, **AT_ONCE)
    made = settings.components.values()
    posted = {tab, settings.origin, settings.presets.choice, *made}
    parts["clear"].click(opening(controller.new), posted, everything, **AT_ONCE)
    parts["temporary"].click(opening(controller.new_temporary), posted, everything, **AT_ONCE)
    _connect_turns(controller, tab, parts, everything, settings)
    _connect_rows(controller, tab, parts, view)


def _connect_rows(
    controller: ConversationEvents, tab: gr.State, parts: dict[str, Any], view: list[Any]
) -> None:
    """Connect what is done with one conversation of the list, and with versions of an answer."""
    rows = parts["conversations"]
    rows.rename_conversation(controller.rename_conversation, [tab], view, **EACH)
    rows.pin_conversation(controller.pin_conversation, [tab], view, **EACH)
    rows.show_bin(controller.show_bin, [tab], view, **EACH)
    rows.empty_bin(controller.empty_bin, [tab], view, **EACH)
    rows.save_conversation(controller.save_conversation, [tab], [parts["saved"]], **EACH)
    rows.search_conversations(controller.search_conversations, [tab], view, **EACH)
    parts["versions"].save_replay(controller.save_replay, [tab], [parts["saved"]], **EACH)
    parts["versions"].show_version(controller.show_version, [tab], view, **EACH)


def _connect_turns(
    controller: ConversationEvents,
    tab: gr.State,
    parts: dict[str, Any],
    outputs: list[Any],
    settings: SettingsPanel,
) -> None:
    """The events that may show another conversation, with its settings."""
    vanilla, rows = settings.components["vanilla"], parts["conversations"]

    def turning(act: Callable[[Tab, Any], View]) -> Callable[[Posted, gr.EventData], Any]:
        def handle(posted: Posted, event: gr.EventData) -> Any:
            before = posted[tab].conversation
            view = act(posted[tab], event)
            shown = controller.session_of(posted[tab])
            if shown.id == before or not shown.settings:
                return [*view, *(gr.skip() for _ in settings.outputs)]
            return [*view, *settings.shown(posted[vanilla], shown.settings)]

        return handle

    for event, act in (
        (rows.open_conversation, controller.open_conversation),
        (rows.delete_conversation, controller.delete_conversation),
        (rows.restore_conversation, controller.restore_conversation),
        (parts["versions"].branch, controller.branch),
    ):
        event(turning(act), {tab, vanilla}, outputs, **EACH)
