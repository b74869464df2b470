"""The Compare tab: one prompt plain and with the drafter, replayed in two columns on one clock."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import MedusaChatError
from medusa_chat.runtime.compare import Progress, add_gap, compare, gap_request
from medusa_chat.runtime.recordings import PLAIN_STEPS, Comparison
from medusa_chat.runtime.session import Session
from medusa_chat.ui.compare.view import progress_view, result_view
from medusa_chat.ui.page.html_blocks import AT_ONCE, QUIET, drawn
from medusa_chat.ui.page.inputs import checked
from medusa_chat.ui.page.status import phase_text
from medusa_chat.ui.page.tree_view import to_line

POLL_SECONDS = 0.25  # seldom: what the page draws would take time from what is measured
EXAMPLE = "Tell me a story about a fox"
SETTINGS = ("acceptance", "temperature", "tree", "max_new_tokens", "seed")
ACCEPTANCES = [
    ("exact: the same text as plain", "exact"),
    ("typical: lossy", "typical"),
    ("typical-sampled: lossy", "typical-sampled"),
]
UNLIMITED: dict[str, Any] = {**QUIET, "concurrency_limit": None}  # the session queues
ModelKey = tuple[str, str, str]
PlainRate = Callable[[ModelKey, float], None]
LastMessage = Callable[[Any], str]


@dataclass
class Race:
    """One browser tab's comparison: what was asked for, and the last result there was."""

    number: int = 0
    text: str = ""
    settings: GenerationSettings | None = None
    result: dict[str, Any] | None = None
    is_running: bool = False
    is_streaming: bool = False
    is_stopped: bool = False


class Track:
    """The tab's side of one session, shared by all browser tabs. Who goes first alternates.

    tell_plain: gets (model, precision, device) and the plain tokens per second of each comparison.
    """

    def __init__(
        self, session: Session, trees: Sequence[str], tell_plain: PlainRate | None = None
    ) -> None:
        self.session = session
        self.trees = tuple(trees)
        self.tell_plain = tell_plain
        self.is_plain_next = True

    def begin(self, race: Race, text: object, *settings: object) -> tuple[Any, ...]:
        """Check what was posted; (picture, run button, stop button)."""
        if race.is_running:
            gr.Info("A comparison is still running here: stop it, or wait for its end.")
            return (gr.skip(),) * 3
        try:
            posted = {"text": text, **dict(zip(SETTINGS, settings, strict=True))}
            inputs = checked(posted, self.trees)
        except MedusaChatError as error:
            return self._line(race, error=str(error)), gr.skip(), gr.skip()
        race.number += 1
        race.text, race.settings = inputs.text, inputs.settings
        race.is_running, race.is_stopped = True, False
        line = self._line(race, state="running", status="starting …")
        return line, gr.update(visible=False), gr.update(visible=True)

    async def stream(self, race: Race) -> AsyncIterator[str]:
        """The picture four times a second until there is a result; closing it stops."""
        if not race.is_running or race.is_streaming or race.settings is None:
            yield gr.skip()
            return
        race.is_streaming = True
        plain_first, self.is_plain_next = self.is_plain_next, not self.is_plain_next
        runs = compare(
            self.session,
            [{"role": "user", "content": race.text}],
            race.settings,
            plain_first=plain_first,
            poll_seconds=0,
        )
        try:
            for event in runs:
                if race.is_stopped:
                    yield self._line(race, error="stopped: a comparison needs both answers whole")
                    return
                if isinstance(event, Comparison):
                    self._keep(race, event)
                    yield self._line(race)
                    await self._ask_gap(race, event)
                    yield self._line(race)
                    return
                yield self._line(race, **self._progress(event, race.settings))
                await asyncio.sleep(POLL_SECONDS)
        except MedusaChatError as error:
            yield self._line(race, error=str(error))
        finally:
            runs.close()
            race.is_streaming = race.is_running = False

    def end(self, race: Race) -> tuple[Any, ...]:
        """(run button, stop button) as they are when nothing runs here."""
        if race.is_running:
            return gr.skip(), gr.skip()
        return gr.update(visible=True), gr.update(visible=False)

    def prefill(self, said: str) -> Any:
        """The prompt box with what was said last in the chat; as it was when nothing was."""
        if not said.strip():
            gr.Info("Nothing was said in the chat yet.")
            return gr.skip()
        return said

    def stop(self, race: Race) -> None:
        """End the comparison at the next step; the last result stays."""
        race.is_stopped = True

    async def _ask_gap(self, race: Race, found: Comparison) -> None:
        """Add how near the first difference was, if the model still can say."""
        request = gap_request(self.session, found)
        if request is None:
            return
        ticket = self.session.submit(request)
        try:
            while not ticket.done.is_set() and not race.is_stopped:
                await asyncio.sleep(POLL_SECONDS / 4)
        finally:
            self.session.cancel(ticket)
        if ticket.result is not None:
            self._keep(race, add_gap(found, ticket.result))

    def _keep(self, race: Race, found: Comparison) -> None:
        race.result = result_view(found) | {"number": race.number}
        stats = found.plain.stats
        if self.tell_plain and stats.tokens_per_second and stats.steps >= PLAIN_STEPS:
            key = (found.model, found.precision, found.device)
            self.tell_plain(key, stats.tokens_per_second)

    def _progress(self, progress: Progress, settings: GenerationSettings) -> dict[str, Any]:
        return progress_view(progress, settings.max_new_tokens, self._waiting_for(progress))

    def _waiting_for(self, progress: Progress) -> str:
        state = self.session.state
        if state.status == "loading":
            return f"waiting for the model: {phase_text(state)} …"
        return f"waiting: {progress.ahead} ahead" if progress.ahead else "starting …"

    def _line(self, race: Race, **now: Any) -> str:
        """JSON for the picture: what happens now, over the last result."""
        is_busy = now.get("state") == "running"
        return to_line({"state": "still", **now, "result": None if is_busy else race.result})


def build_compare(
    session: Session,
    trees: Sequence[str],
    tell_plain: PlainRate | None = None,
    chat: tuple[gr.State, LastMessage] | None = None,
) -> None:
    """Put the Compare tab into the gr.Blocks that is open. trees: presets beside "auto".

    chat: the Chat tab's state, and what gives the last message of the user from its value.
    """
    track = Track(session, trees, tell_plain)
    race = gr.State(Race())
    with gr.Column(elem_id="compare-column"):
        with gr.Column(elem_id="compare-ask"):
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
                stop = gr.Button(
                    "Stop", elem_id="compare-stop", size="sm", variant="stop", visible=False
                )
            use = gr.Button(
                "Use the chat's last message",
                elem_id="compare-use",
                size="sm",
                visible=chat is not None,
            )
            controls = _settings(trees)
        picture = drawn("compare")

    begun = run.click(
        track.begin, [race, prompt, *controls], [picture, run, stop], **UNLIMITED
    ).then(track.stream, [race], [picture], **UNLIMITED)
    begun.then(track.end, [race], [run, stop], **UNLIMITED)
    if chat is not None:
        state, last = chat
        use.click(lambda value: track.prefill(last(value)), [state], [prompt], **AT_ONCE)
    stop.click(track.stop, [race], None, **AT_ONCE)


def _settings(trees: Sequence[str]) -> list[gr.components.Component]:
    """The tab's own settings, closed at first, in the order of SETTINGS."""
    with gr.Accordion("Settings of both runs", open=False, elem_id="compare-settings"):
        with gr.Row():
            acceptance = gr.Dropdown(ACCEPTANCES, value="exact", label="Acceptance")
            temperature = gr.Slider(0, 2, 0, step=0.05, label="Temperature")
            tree = gr.Dropdown(["auto", *trees], value="auto", label="Tree")
        with gr.Row():
            max_new_tokens = gr.Number(256, label="Max new tokens", minimum=1, step=1)
            seed = gr.Textbox("", label="Seed", placeholder="empty: a fresh one", max_lines=1)
    return [acceptance, temperature, tree, max_new_tokens, seed]
