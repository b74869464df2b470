"""CompareController: what the Compare tab's events do: run both, tell how far it is, stop."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import MedusaChatError
from medusa_chat.runtime.compare import Progress, add_gap, compare, gap_request
from medusa_chat.runtime.recordings import Comparison
from medusa_chat.runtime.session import Session
from medusa_chat.ui.access.guard import guest_of
from medusa_chat.ui.compare.view import progress_view, result_view
from medusa_chat.ui.page.inputs import Inputs
from medusa_chat.ui.page.pace import Pace, usual_pace
from medusa_chat.ui.page.status import waiting_text
from medusa_chat.ui.page.tree_view import to_line

POLL_SECONDS = 0.25  # seldom: what the page draws would take time from what is measured


@dataclass
class CompareTab:
    """One browser tab's comparison: what was asked for, and the last result there was.

    pace: as its clock asks for; None is the model's usual one. show_nodes: what that pace drafts in
    every step of this comparison; None where the settings say what is drafted.
    """

    number: int = 0
    text: str = ""
    settings: GenerationSettings | None = None
    pace: Pace | None = None
    show_nodes: int | None = None
    result: dict[str, Any] | None = None
    is_running: bool = False
    is_streaming: bool = False
    is_stopped: bool = False


class CompareController:
    """The tab's side of one session, shared by all browser tabs. Who goes first alternates."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.is_plain_next = True

    def begin(self, tab: CompareTab, inputs: Inputs) -> tuple[Any, ...]:
        """Begin to run both; (picture, run button, stop button)."""
        if tab.is_running:
            gr.Info("A comparison is still running here: stop it, or wait for its end.")
            return (gr.skip(),) * 3
        tab.number += 1
        pace = tab.pace or usual_pace(self.session)
        tab.text, tab.settings = inputs.text, pace.of(inputs, self.session).settings
        tab.show_nodes = pace.nodes if tab.settings != inputs.settings else None
        tab.is_running, tab.is_stopped = True, False
        line = self._line(tab, state="running", status="starting …")
        return line, gr.update(visible=False), gr.update(visible=True)

    def set_pace(self, tab: CompareTab, event: gr.EventData) -> None:
        """The clock of the race was chosen; it goes with the next comparison."""
        tab.pace = Pace.posted(getattr(event, "_data", None), tab.pace)

    def refuse(self, tab: CompareTab, error: MedusaChatError) -> tuple[Any, ...]:
        """What `begin` returns when the input is wrong: one line over the last result."""
        if tab.is_running:
            gr.Info(str(error))
            return (gr.skip(),) * 3
        return self._line(tab, error=str(error)), gr.skip(), gr.skip()

    async def stream(
        self, tab: CompareTab, request: gr.Request | None = None
    ) -> AsyncIterator[str]:
        """The picture four times a second until there is a result; closing it stops."""
        if not tab.is_running or tab.is_streaming or tab.settings is None:
            yield gr.skip()
            return
        tab.is_streaming = True
        plain_first, self.is_plain_next = self.is_plain_next, not self.is_plain_next
        runs = compare(
            self.session,
            [{"role": "user", "content": tab.text}],
            tab.settings,
            plain_first=plain_first,
            guest=guest_of(request),
        )
        try:
            for event in runs:
                if tab.is_stopped:
                    yield self._line(tab, error="stopped: a comparison needs both answers whole")
                    return
                if isinstance(event, Comparison):
                    self._keep(tab, event)
                    yield self._line(tab)
                    await self._ask_gap(tab, event)
                    yield self._line(tab)
                    return
                yield self._line(tab, **self._progress(event, tab.settings))
                await asyncio.sleep(POLL_SECONDS)
        except MedusaChatError as error:
            yield self._line(tab, error=str(error))
        finally:
            runs.close()
            tab.is_streaming = tab.is_running = False

    def end(self, tab: CompareTab) -> tuple[Any, ...]:
        """(run button, stop button) as they are when nothing runs here."""
        if tab.is_running:
            return gr.skip(), gr.skip()
        return gr.update(visible=True), gr.update(visible=False)

    def prefill(self, said: str) -> Any:
        """The prompt box with what was said last in the chat; as it was when nothing was."""
        if not said.strip():
            gr.Info("Nothing was said in the chat yet.")
            return gr.skip()
        return said

    def stop(self, tab: CompareTab) -> None:
        """End the comparison at the next step; the last result stays."""
        tab.is_stopped = True

    async def _ask_gap(self, tab: CompareTab, found: Comparison) -> None:
        """Add how near the first difference was, if the model still can say."""
        request = gap_request(self.session, found)
        if request is None:
            return
        ticket = self.session.submit(request)
        try:
            while not ticket.done.is_set() and not tab.is_stopped:
                await asyncio.sleep(POLL_SECONDS / 4)
        finally:
            self.session.cancel(ticket)
        if ticket.result is not None:
            self._keep(tab, add_gap(found, ticket.result))

    def _keep(self, tab: CompareTab, found: Comparison) -> None:
        of_tab = {"number": tab.number, "show_nodes": tab.show_nodes, "prompt": tab.text}
        tab.result = result_view(found) | of_tab

    def _progress(self, progress: Progress, settings: GenerationSettings) -> dict[str, Any]:
        waiting = waiting_text(self.session.state, progress.ahead)
        return progress_view(progress, settings.max_new_tokens, waiting)

    def _line(self, tab: CompareTab, **now: Any) -> str:
        """JSON for the picture: what happens now, over the last result."""
        is_busy = now.get("state") == "running"
        return to_line({"state": "still", **now, "result": None if is_busy else tab.result})
