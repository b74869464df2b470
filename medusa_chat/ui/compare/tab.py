"""The Compare tab: one prompt plain and with the drafter, replayed in two columns on one clock."""

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from medusa_chat.runtime.session import Session
from medusa_chat.ui.compare.controller import CompareController, CompareTab
from medusa_chat.ui.compare.view import NAMES
from medusa_chat.ui.page.html_blocks import AT_ONCE, page, script_block
from medusa_chat.ui.page.inputs import SIDES, SettingsForm, touched
from medusa_chat.ui.page.tree_view import to_line

KEY = "medusa-chat-race-settings"
FROM_BROWSER = f"""() => {{
  try {{
    return [localStorage.getItem('{KEY}') || ''];
  }} catch {{
    return [''];
  }}
}}"""
EXAMPLE = "Tell me a story about a fox"
SIDES_SHOWN = [(NAMES[name], name) for name in SIDES]
ACCEPTANCES = [
    ("exact: the same text as plain", "exact"),
    ("typical: lossy", "typical"),
    ("typical-sampled: lossy", "typical-sampled"),
]


def build_compare(
    session: Session, trees: Sequence[str], chat: gr.State, last_message: Callable[[Any], str]
) -> None:
    """Put the Compare tab into the gr.Blocks that is open. trees: presets beside "auto".

    chat: the Chat tab's state; last_message: gives what the user said last from its value.
    """
    controller = CompareController(session)
    tab = gr.State(CompareTab())
    with gr.Column(elem_id="compare-column"):
        with gr.Column(elem_id="compare-ask"):
            prompt, run, stop = _prompt()
            use = gr.Button("Use the chat's last message", elem_id="compare-use", size="sm")
            settings = _settings(trees)
            _remember(settings)
        picture = script_block("compare", events=["look", "pace"])

    begin = settings.handler(controller.begin, controller.refuse, tab, text=prompt)
    posted = {tab, prompt, *settings.components.values()}
    shown = [picture, run, stop]
    gr.on([run.click, prompt.submit], begin, posted, shown, **AT_ONCE)
    picture.look(controller.look, [tab], shown, **AT_ONCE)
    use.click(lambda value: controller.prefill(last_message(value)), [chat], [prompt], **AT_ONCE)
    picture.pace(controller.set_pace, [tab], None, **AT_ONCE, trigger_mode="multiple")
    stop.click(controller.stop, [tab], None, **AT_ONCE)


def _prompt() -> tuple[gr.Textbox, gr.Button, gr.Button]:
    """(the prompt's box, run button, stop button)."""
    with gr.Row(elem_id="compare-actions"):
        prompt = gr.Textbox(
            EXAMPLE,
            elem_id="compare-prompt",
            label="Prompt for both",
            container=False,
            lines=1,
            max_lines=8,
        )
        run = gr.Button("Run both", elem_id="compare-run", size="sm", variant="primary")
        stop = gr.Button("Stop", elem_id="compare-stop", size="sm", variant="stop", visible=False)
    return prompt, run, stop


def _settings(trees: Sequence[str]) -> SettingsForm:
    """The tab's own settings, closed at first."""
    with gr.Accordion("Settings of both runs", open=False, elem_id="compare-settings"):
        with gr.Row():
            made: dict[str, gr.components.Component] = {
                "against": gr.Dropdown(SIDES_SHOWN, value="none", label="Left"),
                "drafter": gr.Dropdown(SIDES_SHOWN[1:], value="auto", label="Right"),
            }
        with gr.Row():
            made |= {
                "acceptance": gr.Dropdown(ACCEPTANCES, value="exact", label="Acceptance"),
                "temperature": gr.Slider(0, 2, 0, step=0.05, label="Temperature"),
                "tree": gr.Dropdown(["auto", *trees], value="auto", label="Tree"),
            }
        with gr.Row():
            length = gr.Number(256, label="Max new tokens", step=1)
            seed = gr.Textbox("", label="Seed", placeholder="empty: a fresh one", max_lines=1)
    made |= {"max_new_tokens": length, "seed": seed}
    return SettingsForm(made, trees, {name: one.value for name, one in made.items()})


def _remember(settings: SettingsForm) -> None:
    """The browser keeps the settings that were touched last, for its next visit."""
    fields = list(settings.components.values())
    kept = script_block("kept", elem_id="compare-kept", KEY=KEY, PANEL="compare-settings")

    def restore(line: object) -> list[Any]:
        values = settings.restored(line)
        return [values[name] for name in settings.components]

    gr.on(
        [event for field in fields for event in touched(field)],
        lambda posted: to_line(settings.valid(posted)),
        set(fields),
        [kept],
        trigger_mode="always_last",
        **AT_ONCE,
    )
    page().load(restore, [kept], fields, js=FROM_BROWSER, **AT_ONCE)
