"""The Chat tab: the list, the conversation over its composer, the microscope on every step."""

from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr

from medusa_chat.runtime.history import History
from medusa_chat.runtime.pdf_text import MAX_FILE
from medusa_chat.runtime.session import Session
from medusa_chat.ui.chat.browser_tab import Tab
from medusa_chat.ui.chat.controller import ChatController
from medusa_chat.ui.chat.conversation_panel import (
    SYSTEM_OPENER,
    build_heading,
    build_list,
    build_system,
    connect_conversations,
)
from medusa_chat.ui.chat.presets import PresetEvents
from medusa_chat.ui.chat.settings_panel import SettingsPanel, build_settings
from medusa_chat.ui.chat.view import View
from medusa_chat.ui.page.html_blocks import AT_ONCE, script_block
from medusa_chat.ui.page.inputs import MAX_CHARACTERS, PLACE, Act, Refuse
from medusa_chat.ui.page.markup import DELIMITERS

EXAMPLES = (  # chosen by measuring: ten steps and more, two tokens a step (tests/ui/test_pace.py)
    "Tell me a story about a goat",
    "How do I write a letter?",
    "Tell me how to clean my room",
    "Give me some tips to sleep better",
)
WELCOME = (
    '<div class="welcome"><h2>Chat, and see why it is fast</h2><p>Small extra heads guess several '
    "tokens ahead, and the model checks all guesses in one pass. You see each step.</p></div>"
)
PANEL_EVENTS = ("continue_from", "newest", "pace", "peek", "pick", "watch")
NEXT_EVENTS = ("drop", "redraw", "refresh", "shown", "tick", "write")
STEADY: dict[str, Any] = {**AT_ONCE, "trigger_mode": "multiple"}
# The last input of Stop: of how many steps it is, where they are shown one by one (show.js).
SHOWN = "async (tab, _) => [tab, String((await import('medusa/show.js')).show.shown())]"
LEAVES_BOX = (
    "async (...posted) => { (await import('medusa/page.js')).setUnderWay(''); return posted; }"
)
TEXT_SO_FAR = "async () => (await import('medusa/page.js')).page.said"  # said.js puts it there
TAKES_BOX = "async (...posted) => (await import('medusa/next.js')).takeBox(posted, {})"


def build_chat(
    session: Session,
    trees: Sequence[str],
    history: History | None,
    offer: Mapping[str, str],
) -> tuple[ChatController, gr.State]:
    """Put the Chat tab into the gr.Blocks that is open; its controller and state. trees: presets
    beside "auto". offer: the model that is offered while the demo is loaded: id, toy, text."""
    controller = ChatController(session, trees, history)
    tab = gr.State(Tab())
    with gr.Row(elem_id="columns"):
        parts = build_heading() | build_list()
        with gr.Column(elem_id="left", scale=5, min_width=320):
            parts |= _conversation(offer)
            settings = _composer(controller, tab, trees, parts)
        with gr.Column(elem_id="right", scale=6, min_width=320):
            panel = script_block("tree", events=PANEL_EVENTS)
            card = script_block("card", elem_id="peek")
            parts["tint"] = script_block("tint")
    parts |= {"panel": panel, "card": card}
    _connect(controller, tab, parts)
    connect_conversations(controller, tab, parts, settings)
    PresetEvents(controller, tab, parts, settings).connect()
    _connect_answers(controller, tab, parts, settings)
    return controller, tab


def _conversation(offer: Mapping[str, str]) -> dict[str, Any]:
    """The conversation and the answer that is being written."""
    parts: dict[str, Any] = {}
    with gr.Column(elem_id="conversation"):
        with gr.Column(elem_id="empty") as parts["empty"]:
            gr.HTML(WELCOME, js_on_load=None)
            with gr.Row(elem_id="examples"):
                parts["examples"] = [gr.Button(text, size="sm") for text in EXAMPLES]
            script_block("offer", OFFER=offer)
        parts["history"] = gr.Chatbot(
            elem_id="history",
            label="Conversation",
            show_label=False,
            container=False,
            height=None,
            buttons=["copy"],
            editable="all",
            layout="bubble",
            feedback_options=None,
            group_consecutive_messages=False,
            placeholder=" ",
            latex_delimiters=DELIMITERS,
        )
        with gr.Row(elem_id="turns"):
            for name, label in (
                ("regenerate", "Regenerate"),
                ("proceed", "Continue"),
                ("undo", "Undo"),
            ):
                parts[name] = gr.Button(label, elem_id=name, size="sm", interactive=False)
            parts["redo"] = gr.Button("Redo", elem_id="redo", size="sm", visible=False)
        parts["versions"] = script_block(
            "versions", events=["branch", "save_replay", "show_version", "steps"]
        )
        parts["live"] = script_block("live")  # what the model thinks comes before what it says
        parts["text"] = _prose()
        parts["next"] = script_block("next", events=NEXT_EVENTS)
    return parts


def _prose() -> gr.Markdown:
    """The text that comes, drawn as the conversation will draw it: nothing jumps at the end."""
    prose = gr.Markdown(
        elem_id="live-text",
        elem_classes=["live-text"],
        line_breaks=True,
        latex_delimiters=DELIMITERS,
    )
    # Gradio would take indentation and tabs away here, and only here.
    prose.postprocess = lambda value: value
    return prose


def _composer(
    controller: ChatController, tab: gr.State, trees: Sequence[str], parts: dict[str, Any]
) -> SettingsPanel:
    """Where the user writes, and how the answer is made: its settings. Adds to `parts`."""
    with gr.Column(elem_id="composer"):
        parts["system"] = build_system()
        parts["count"] = script_block("count", events=["count"])
        parts["box"] = gr.Textbox(
            elem_id="box",
            label="Message",
            show_label=False,
            container=False,
            placeholder="Write a message",
            lines=1,
            max_lines=8,
            autofocus=True,
        )
        with gr.Row(elem_id="actions"):
            script_block("attach", MAX_CHARACTERS=MAX_CHARACTERS, MAX_PDF=MAX_FILE)
            plain = gr.Checkbox(label="Plain", elem_id="vanilla", container=False, render=False)
            settings = build_settings(
                trees,
                plain,
                parts["system"],
                tab,
                controller.keep_settings,
                lambda: controller.session.state.model,
            )
            gr.HTML(SYSTEM_OPENER, elem_id="system-opener", js_on_load=None)
            plain.render()
            parts["send"] = gr.Button("Send", elem_id="send", size="sm", variant="primary")
            parts["stop"] = gr.Button(
                "Stop", elem_id="stop", size="sm", variant="stop", visible=False
            )
    return settings


def _connect(controller: ChatController, tab: gr.State, parts: dict[str, Any]) -> None:
    """Which event does what. Every view may ask the tab's script, through `next`, to refresh
    or to follow the answer that runs: so an answer is followed whoever began it."""
    view = [parts[name] for name in View._fields]
    history, following = parts["history"], parts["next"]
    following.tick(controller.tick, [tab, following], [following], **AT_ONCE)
    following.refresh(controller.refresh, [tab], view, **AT_ONCE)
    following.redraw(controller.redraw, [tab], view, **STEADY)
    following.write(None, None, [parts["text"]], js=TEXT_SO_FAR, **STEADY)
    following.shown(controller.end_show, [tab], None, **STEADY)
    following.drop(controller.drop, [tab], view, **STEADY)

    parts["versions"].steps(controller.choose, [tab], [parts["panel"]], **STEADY)
    history.select(controller.choose, [tab], [parts["panel"]], **STEADY)
    parts["undo"].click(controller.undo, [tab], view, **AT_ONCE)
    parts["redo"].click(controller.redo, [tab], view, **AT_ONCE)
    parts["stop"].click(controller.stop, [tab, following], None, js=SHOWN, **AT_ONCE)
    parts["system"].blur(controller.set_system, [tab, parts["system"]], None, **STEADY)
    parts["count"].count(controller.count, [tab], [parts["count"]], **STEADY)
    parts["panel"].pace(controller.set_pace, [tab], None, **STEADY)
    parts["panel"].pick(controller.pick, [tab], [parts["panel"]], **STEADY)
    parts["panel"].watch(controller.watch, [tab], [parts["panel"]], **AT_ONCE)
    parts["panel"].newest(controller.newest, [tab], [parts["panel"]], **STEADY)
    parts["panel"].peek(controller.peek, [tab], [parts["card"]], **STEADY)


def _connect_answers(
    controller: ChatController, tab: gr.State, parts: dict[str, Any], settings: SettingsPanel
) -> None:
    """The events that ask for an answer: each posts all settings and is refused at the border."""
    view = [parts[name] for name in View._fields]
    posted = {tab, *settings.components.values()}

    def on(
        event: Any,
        name: str,
        act: Act,
        refuse: Refuse,
        how: Mapping[str, Any] = AT_ONCE,
        **sources: Any,
    ) -> None:
        boxes = {source for source in sources.values() if not isinstance(source, str)}
        handle = settings.handler(act, refuse, tab, **sources)
        event(handle, posted | boxes, view, api_name=name, **how)

    box, refuse = parts["box"], controller.refuse
    among = sorted((*posted, box), key=lambda component: component._id)  # as Gradio posts a set
    takes = TAKES_BOX.format(among.index(box))
    # The script drops a second press for the same message; another message must not be dropped.
    for event, source, how in (
        (box.submit, box, {**STEADY, "js": takes}),
        (parts["send"].click, box, {**STEADY, "js": takes}),
        *((one.click, one, {**AT_ONCE, "js": LEAVES_BOX}) for one in parts["examples"]),
    ):
        on(event, "send", controller.send, controller.refuse_send, how, text=source)
    on(parts["regenerate"].click, "regenerate", controller.regenerate, refuse)
    on(parts["proceed"].click, "proceed", controller.proceed, refuse)
    place = {name: name for name in PLACE}
    act = controller.continue_from
    on(parts["panel"].continue_from, "continue_from", act, refuse, STEADY, **place)
    # The browser draws an edit before it is answered: a second one meanwhile must not be dropped.
    edited = {"text": "value", "row": "index"}
    on(parts["history"].edit, "edit", controller.edit, controller.refuse_edit, STEADY, **edited)
