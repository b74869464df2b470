"""Desk: what the Chat tab's events do. Every input passes `inputs.checked` first."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from medusa_chat.errors import MedusaChatError
from medusa_chat.messages import Message
from medusa_chat.session import Job, Session
from medusa_chat.ui.answer import Answer, shown
from medusa_chat.ui.inputs import checked
from medusa_chat.ui.panel import panel_line
from medusa_chat.ui.peek import card_line
from medusa_chat.ui.status import phase_text
from medusa_chat.ui.tree_view import to_line

POLL_SECONDS = 0.06
KEEP_ALIVE_SECONDS = 0.5  # a tab that was closed is noticed at the next yield
MAX_SHOWN = 200  # messages; a longer conversation is kept, but drawing it all would be slow
SETTINGS = (
    "vanilla",
    "acceptance",
    "temperature",
    "posterior_threshold",
    "posterior_alpha",
    "tree",
    "max_new_tokens",
    "seed",
    "system",
)
RULES = {
    "exact": "exact: every token is the model's own; same text as plain decoding "
    "with the same seed.",
    "typical": "typical: lossy and deterministic; temperature only relaxes acceptance.",
    "typical-sampled": "typical-sampled: lossy, sampled from the tokens that pass the test.",
}


@dataclass
class Chat:
    """One browser tab: its conversation and the answer that runs or ran last."""

    messages: list[Message] = field(default_factory=list)
    notes: dict[int, str] = field(default_factory=dict)
    answer: Answer = field(default_factory=Answer)
    job: Job | None = None
    is_running: bool = False
    is_streaming: bool = False


class Desk:
    """The page's side of one session, shared by all tabs."""

    def __init__(self, session: Session, trees: Sequence[str]) -> None:
        self.session = session
        self.trees = tuple(trees)
        self.plain: dict[tuple[str, str, str], float] = {}

    def begin(self, chat: Chat, text: object, *settings: object) -> tuple[Any, ...]:
        """Check, queue the job and show the message; a refusal changes nothing but the line."""
        if chat.is_running:
            gr.Info("An answer is still running here: stop it, or wait for its end.")
            return (gr.skip(),) * 6
        try:
            posted = {"text": text, **dict(zip(SETTINGS, settings, strict=True))}
            inputs = checked(posted | {"history": chat.messages}, self.trees)
        except MedusaChatError as error:
            chat.job = None
            return _refused(str(error))
        chat.messages = [*inputs.history, {"role": "user", "content": inputs.text}]
        system = [{"role": "system", "content": inputs.system}] if inputs.system else []
        chat.answer = Answer(chat.answer.number + 1)
        chat.is_running = True
        chat.job = self.session.submit([*system, *chat.messages], inputs.settings)
        return self._view(chat, box="")

    async def stream(self, chat: Chat) -> AsyncIterator[tuple[str, str]]:
        """(live, panel) about 15 times a second until the job has ended; closing it stops."""
        job, answer = chat.job, chat.answer
        if job is None or not chat.is_running or chat.is_streaming:
            yield gr.skip(), gr.skip()
            return
        chat.is_streaming = True
        try:
            taken, panel, told = 0, self._panel(answer), 0.0
            while True:
                is_done = job.done.is_set()  # asked before reading: the last event is not missed
                events = job.trace[taken:]
                taken += len(events)
                before = answer.live
                answer.take(events)
                answer.first_seconds = job.first_seconds
                answer.say("" if is_done else self._waiting_for(job, answer))
                if events:
                    panel = self._panel(answer)
                if answer.live != before or events or time.monotonic() > told + KEEP_ALIVE_SECONDS:
                    told = time.monotonic()
                    yield answer.live, panel
                if is_done or job is not chat.job or (job.is_cancelled and job.state == "waiting"):
                    return
                await asyncio.sleep(POLL_SECONDS)
        finally:
            chat.is_streaming = False
            if not job.done.is_set():
                self.session.stop(job)

    def commit(self, chat: Chat) -> tuple[Any, ...]:
        """Move what was generated into the conversation, once."""
        job, answer = chat.job, chat.answer
        if job is None or not chat.is_running or chat.is_streaming:
            return (*[gr.skip()] * 6, gr.skip())
        chat.is_running, chat.job = False, None
        if answer.plain_rate and answer.model_key:
            self.plain[answer.model_key] = answer.plain_rate
        note = f"stopped: {job.error}" if job.error else answer.note
        line, box = job.error, None
        if not answer.text and (job.error or answer.finished is None or note):
            box = chat.messages.pop()["content"]
            line = line or (answer.finished.message if answer.finished else "") or note
        else:
            if note:
                chat.notes[len(chat.messages)] = note
            chat.messages = [*chat.messages, {"role": "assistant", "content": answer.text}]
        return (*self._view(chat, line, box), self._panel(answer))

    def stop(self, chat: Chat) -> None:
        """End the answer at its next step; the text so far is kept."""
        if chat.job is not None:
            self.session.stop(chat.job)

    def clear(self, chat: Chat) -> tuple[Any, ...]:
        """Forget the conversation, ending the answer that runs."""
        self.stop(chat)
        chat.messages, chat.notes, chat.job, chat.is_running = [], {}, None, False
        chat.answer = Answer(chat.answer.number + 1)
        return (*self._view(chat, box=""), "")

    def pick(self, chat: Chat, event: gr.EventData) -> str:
        """The panel with the step the user clicked; without one the latest."""
        try:
            step = checked({"step": event._data.get("step")}, self.trees).step
        except (MedusaChatError, AttributeError):
            step = None
        return self._panel(chat.answer, step)

    async def peek(self, chat: Chat, event: gr.EventData) -> str:
        """What the model would have said at the node the user clicked."""
        posted = event._data if isinstance(event._data, dict) else {}
        return await card_line(self.session, chat.answer, posted.get("step"), posted.get("node"))

    def explain(self, acceptance: object, temperature: object) -> tuple[Any, ...]:
        """What the acceptance guarantees, and whether epsilon and delta do anything."""
        try:
            posted = {"acceptance": acceptance, "temperature": temperature}
            settings = checked(posted, self.trees).settings
        except MedusaChatError as error:
            return str(error), gr.skip(), gr.skip()
        text, is_used = self.rule_of(settings.acceptance, settings.is_greedy)
        return text, gr.update(interactive=is_used), gr.update(interactive=is_used)

    def rule_of(self, acceptance: str, is_greedy: bool) -> tuple[str, bool]:
        """(the line under the settings, whether epsilon and delta are used)."""
        if acceptance == "exact":
            return f"{RULES[acceptance]} ε and δ belong to typical acceptance and are off.", False
        if is_greedy:
            return "At temperature 0 every acceptance is greedy decoding: ε and δ are off.", False
        return RULES[acceptance], True

    def _waiting_for(self, job: Job, answer: Answer) -> str:
        if answer.prefilled is not None:
            return ""
        if job.state == "running":
            return "prefill: reading the conversation …"
        ahead = self.session.position(job)
        if ahead:
            return f"waiting: {ahead} ahead"
        state = self.session.state
        if state.status == "loading":
            return f"waiting for the model: {phase_text(state)} …"
        return "starting …"

    def _panel(self, answer: Answer, step: int | None = None) -> str:
        key = answer.model_key
        return panel_line(answer, answer.plain_rate or (self.plain.get(key) if key else None), step)

    def _view(self, chat: Chat, line: str = "", box: object = None) -> tuple[Any, ...]:
        """history, live, box, empty, send, stop: all that follows from the chat's state."""
        first = max(0, len(chat.messages) - MAX_SHOWN)
        return (
            shown(chat.messages, chat.notes)[first:],
            _error(line) if line else "",
            gr.skip() if box is None else box,
            gr.update(visible=not chat.messages),
            gr.update(visible=not chat.is_running),
            gr.update(visible=chat.is_running),
        )


def _error(line: str) -> str:
    return to_line({"error": line}) + "\n"


def _refused(line: str) -> tuple[Any, ...]:
    """The same six outputs with nothing but the line changed."""
    return gr.skip(), _error(line), *[gr.skip()] * 4
