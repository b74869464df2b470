"""The Compare tab: one prompt plain and with the drafter, replayed in two columns on one clock."""

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from medusa_chat.runtime.session import Session
from medusa_chat.ui.compare.controller import CompareController, CompareTab
from medusa_chat.ui.page.html_blocks import AT_ONCE, QUIET, script_block
from medusa_chat.ui.page.pace import gpu_times
from medusa_chat.ui.page.settings_form import SettingsForm

EXAMPLE = "Tell me a story about a fox"
ACCEPTANCES = [
    ("exact: the same text as plain", "exact"),
    ("typical: lossy", "typical"),
    ("typical-sampled: lossy", "typical-sampled"),
]
UNLIMITED: dict[str, Any] = {**QUIET, "concurrency_limit": None}  # the session queues
LastMessage = Callable[[Any], str]


def build_compare(
    session: Session,
    trees: Sequence[str],
    chat: tuple[gr.State, LastMessage] | None = None,
) -> None:
    """Put the Compare tab into the gr.Blocks that is open. trees: presets beside "auto".

    chat: the Chat tab's state, and what gives the last message of the user from its value.
    """
    controller = CompareController(session)
    tab = gr.State(CompareTab())
    with gr.Column(elem_id="compare-column"):
        with gr.Column(elem_id="compare-ask"):
            prompt, run, stop = _prompt()
            use = gr.Button(
                "Use the chat's last message",
                elem_id="compare-use",
                size="sm",
                visible=chat is not None,
            )
            settings = _settings(trees)
        picture = script_block("compare", GPU_TIMES=gpu_times())

    begin = settings.handler(controller.begin, controller.refuse, tab, text=prompt)
    posted = {tab, prompt, *settings.components.values()}
    asks = [run.click, prompt.submit]
    begun = gr.on(asks, begin, posted, [picture, run, stop], **UNLIMITED).then(
        controller.stream, [tab], [picture], **UNLIMITED
    )
    begun.then(controller.end, [tab], [run, stop], **UNLIMITED)
    if chat is not None:
        state, last = chat
        use.click(lambda value: controller.prefill(last(value)), [state], [prompt], **AT_ONCE)
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
                "acceptance": gr.Dropdown(ACCEPTANCES, value="exact", label="Acceptance"),
                "temperature": gr.Slider(0, 2, 0, step=0.05, label="Temperature"),
                "tree": gr.Dropdown(["auto", *trees], value="auto", label="Tree"),
            }
        with gr.Row():
            length = gr.Number(256, label="Max new tokens", step=1)
            seed = gr.Textbox("", label="Seed", placeholder="empty: a fresh one", max_lines=1)
    return SettingsForm({**made, "max_new_tokens": length, "seed": seed}, trees)
