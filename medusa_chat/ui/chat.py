"""The Chat tab: talk on the left, the numbers and the tree of every step on the right."""

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from medusa_chat.session import Session
from medusa_chat.ui.desk import Chat, Desk
from medusa_chat.ui.drawn import AT_ONCE, QUIET, drawn

EXAMPLES = (
    "Book a table for two in San Jose",
    "What is the capital of Spain?",
    "Tell me a story about a fox",
    "Why are you fast?",
)
ACCEPTANCES = [
    ("exact", "exact"),
    ("typical (lossy)", "typical"),
    ("typical-sampled (lossy)", "typical-sampled"),
]
WELCOME = (
    '<div class="welcome"><h2>Chat, and see why it is fast</h2><p>Every step proposes a tree of '
    "candidate tokens; the picture shows which path was accepted, and why the rest was not.</p>"
    "</div>"
)
UNLIMITED: dict[str, Any] = {**QUIET, "concurrency_limit": None}  # the session queues


def build_chat(session: Session, trees: Sequence[str]) -> None:
    """Put the Chat tab into the gr.Blocks that is open. trees: presets beside "auto"."""
    desk = Desk(session, trees)
    chat = gr.State(Chat())
    with gr.Row(elem_id="columns"):
        with gr.Column(elem_id="left", scale=5, min_width=320):
            with gr.Column(elem_id="talk"):
                with gr.Column(elem_id="empty") as empty:
                    gr.HTML(WELCOME, js_on_load=None)
                    with gr.Row(elem_id="examples"):
                        examples = [gr.Button(text, size="sm") for text in EXAMPLES]
                history = gr.Chatbot(
                    elem_id="history",
                    label="Conversation",
                    show_label=False,
                    container=False,
                    height=None,
                    buttons=["copy"],
                    layout="bubble",
                    feedback_options=None,
                    group_consecutive_messages=False,
                    placeholder=" ",
                )
                live = drawn("live")
            with gr.Column(elem_id="composer"):
                box = gr.Textbox(
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
                    vanilla = gr.Checkbox(
                        label="Vanilla (plain)", elem_id="vanilla", container=False
                    )
                    clear = gr.Button("Clear", elem_id="clear", size="sm")
                    send = gr.Button("Send", elem_id="send", size="sm", variant="primary")
                    stop = gr.Button(
                        "Stop", elem_id="stop", size="sm", variant="stop", visible=False
                    )
        with gr.Column(elem_id="right", scale=6, min_width=320):
            controls = _settings(desk, trees)
            panel, card = drawn("tree"), drawn("peek")

    settings = [vanilla, *controls]
    after = [history, live, box, empty, send, stop]

    def begin_with(event: Callable[..., Any], source: gr.components.Component) -> None:
        begun = event(desk.begin, [chat, source, *settings], after, **UNLIMITED)
        streamed = begun.then(desk.stream, [chat], [live, panel], **UNLIMITED)
        streamed.then(desk.commit, [chat], [*after, panel], **UNLIMITED)

    begin_with(box.submit, box)
    begin_with(send.click, box)
    for example in examples:
        begin_with(example.click, example)
    stop.click(desk.stop, [chat], None, **AT_ONCE)
    clear.click(desk.clear, [chat], [*after, panel], **AT_ONCE)
    panel.pick(desk.pick, [chat], [panel], **AT_ONCE, trigger_mode="multiple")
    panel.peek(desk.peek, [chat], [card], **AT_ONCE, trigger_mode="multiple")


def _settings(desk: Desk, trees: Sequence[str]) -> list[gr.components.Component]:
    """The settings, closed at first; returns them in the order of desk.SETTINGS after vanilla."""
    with gr.Accordion("Settings", open=False, elem_id="settings"):
        with gr.Row():
            acceptance = gr.Dropdown(ACCEPTANCES, value="exact", label="Acceptance")
            tree = gr.Dropdown(["auto", *trees], value="auto", label="Tree")
        with gr.Row():
            temperature = gr.Slider(0, 2, 0.7, step=0.05, label="Temperature")
            max_new_tokens = gr.Number(512, label="Max new tokens", minimum=1, step=1)
            seed = gr.Textbox("", label="Seed", placeholder="empty: a fresh one", max_lines=1)
        why = gr.HTML(desk.rule_of("exact", False)[0], elem_id="rule", js_on_load=None)
        with gr.Row():
            epsilon = gr.Slider(
                0, 1, 0.09, step=0.01, label="ε (posterior threshold)", interactive=False
            )
            delta = gr.Slider(
                0, 0.99, 0.3, step=0.01, label="δ (posterior alpha)", interactive=False
            )
        system = gr.Textbox("", label="System prompt (optional)", lines=1, max_lines=6)
    for control in (acceptance, temperature):
        control.change(
            desk.explain,
            [acceptance, temperature],
            [why, epsilon, delta],
            trigger_mode="always_last",
            **AT_ONCE,
        )
    return [acceptance, temperature, epsilon, delta, tree, max_new_tokens, seed, system]
