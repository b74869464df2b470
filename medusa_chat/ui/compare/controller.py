"""CompareController: what the Compare tab's events do: run both, tell how far it is, stop."""

import threading
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import gradio as gr

from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import MedusaChatError, first_line
from medusa_chat.runtime.compare import Comparison, Progress, add_gap, compare, gap_request
from medusa_chat.runtime.session import Session
from medusa_chat.ui.access.guard import ASKER, OWNER
from medusa_chat.ui.access.notices import inform
from medusa_chat.ui.compare.view import lane_names, progress_view, result_view
from medusa_chat.ui.page.html_blocks import event_field
from medusa_chat.ui.page.inputs import Inputs
from medusa_chat.ui.page.pace import Pace, usual_pace
from medusa_chat.ui.page.status import waiting_text
from medusa_chat.ui.page.tree_view import to_line

POLL_SECONDS = 0.25  # seldom: what the page draws would take time from what is measured
GONE_SECONDS = 90.0  # that nobody looked: a hidden page is woken once a minute
STOPPED = "stopped: a comparison needs two finished answers"


@dataclass
class CompareTab:
    """One browser tab's comparison: what was asked for, and the last result there was. against: the
    drafter of the first side.

    pace: as its clock asks for; None is the model's usual one. show_nodes: what that pace drafts in
    every step of this comparison; None where the settings say what is drafted. line, at: JSON of
    the picture as it is now, and how many there were. seen_at: when the page looked last.
    """

    number: int = 0
    text: str = ""
    settings: GenerationSettings | None = None
    against: str = "none"
    pace: Pace | None = None
    show_nodes: int | None = None
    result: dict[str, Any] | None = None
    is_running: bool = False
    is_stopped: bool = False
    line: str = ""
    at: int = 0
    seen_at: float = 0.0


class CompareController:
    """The tab's side of one session, shared by all browser tabs. Who goes first alternates.

    A comparison runs in a thread, and the page looks at it: a link that breaks ends nothing.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.is_plain_next = True

    def begin(self, tab: CompareTab, inputs: Inputs) -> tuple[Any, ...]:
        """Begin to run both; (picture, run button, stop button)."""
        if tab.is_running:
            inform("A comparison is still running here: stop it, or wait for its end.")
            return self.look(tab)
        tab.number += 1
        pace = tab.pace or usual_pace(self.session)
        tab.text, tab.settings = inputs.text, pace.of(inputs, self.session).settings
        tab.against = inputs.against
        tab.show_nodes = pace.nodes if tab.settings != inputs.settings else None
        tab.is_running, tab.is_stopped, tab.seen_at = True, False, time.monotonic()
        self._tell(tab, state="running", status="starting …")
        asker = ASKER.get() or OWNER
        run = (tab, tab.settings, "" if asker == OWNER else asker)
        threading.Thread(target=self._run, args=run, name="compare", daemon=True).start()
        return self.look(tab)

    def look(self, tab: CompareTab, event: gr.EventData | None = None) -> tuple[Any, ...]:
        """What `begin` returns as it is now, where the page does not have it yet."""
        tab.seen_at = time.monotonic()
        if event is not None and event_field(event, "at") == tab.at:
            return (gr.skip(),) * 3
        is_running = tab.is_running
        return tab.line, gr.update(visible=not is_running), gr.update(visible=is_running)

    def set_pace(self, tab: CompareTab, event: gr.EventData) -> None:
        """The clock of the race was chosen; it goes with the next comparison."""
        tab.pace = Pace.posted(getattr(event, "_data", None), tab.pace)

    def refuse(self, tab: CompareTab, error: MedusaChatError) -> tuple[Any, ...]:
        """What `begin` returns when the input is wrong: one line over the last result."""
        if tab.is_running:
            inform(str(error))
        else:
            self._tell(tab, error=str(error))
        return self.look(tab)

    def prefill(self, said: str) -> Any:
        """The prompt box with what was said last in the chat; as it was when nothing was."""
        if not said.strip():
            inform("The chat has no messages yet.")
            return gr.skip()
        return said

    def stop(self, tab: CompareTab) -> None:
        """End the comparison at the next step; the last result stays."""
        tab.is_stopped = True

    # ---- what runs ----

    def _run(self, tab: CompareTab, settings: GenerationSettings, guest: str) -> None:
        """Run both, and tell how far it is four times a second and how it ended."""
        plain_first, self.is_plain_next = self.is_plain_next, not self.is_plain_next
        said, error = [{"role": "user", "content": tab.text}], ""
        runs = compare(
            self.session,
            said,
            settings,
            plain_first=plain_first,
            guest=guest,
            against=tab.against,
        )
        try:
            with closing(runs):
                for event in runs:
                    if isinstance(event, Comparison):
                        self._keep(tab, event)
                        self._tell(tab)
                        self._ask_gap(tab, event)
                    elif self._is_over(tab):
                        error = STOPPED
                        break
                    else:
                        names = lane_names(tab.against, settings.drafter)
                        self._tell(tab, **self._progress(event, settings, names))
                        time.sleep(POLL_SECONDS)
        except MedusaChatError as failure:
            error = str(failure)
        except Exception as failure:  # shown on the page: the app itself goes on
            error = f"unexpected {type(failure).__name__}: {first_line(failure)}"
        tab.is_running = False
        self._tell(tab, **({"error": error} if error else {}))

    def _is_over(self, tab: CompareTab) -> bool:
        return tab.is_stopped or time.monotonic() - tab.seen_at > GONE_SECONDS

    def _ask_gap(self, tab: CompareTab, comparison: Comparison) -> None:
        """Add how near the first difference was, if the model still can say."""
        request = gap_request(self.session, comparison)
        if request is None:
            return
        ticket = self.session.submit(request)
        while not ticket.done.wait(POLL_SECONDS / 4) and not self._is_over(tab):
            pass
        self.session.cancel(ticket)
        if ticket.result is not None:
            self._keep(tab, add_gap(comparison, ticket.result))

    def _keep(self, tab: CompareTab, comparison: Comparison) -> None:
        of_tab = {"number": tab.number, "show_nodes": tab.show_nodes, "prompt": tab.text}
        tab.result = result_view(comparison) | of_tab

    def _progress(
        self, progress: Progress, settings: GenerationSettings, names: list[str]
    ) -> dict[str, Any]:
        waiting = waiting_text(self.session.state, progress.ahead)
        return progress_view(progress, settings.max_new_tokens, waiting, names)

    def _tell(self, tab: CompareTab, **now: Any) -> None:
        """What the picture shows from now on, over the last result. more: whether to look again."""
        is_busy = now.get("state") == "running"
        shown = {"state": "still", **now, "result": None if is_busy else tab.result}
        at = tab.at + 1
        tab.line = to_line({**shown, "more": tab.is_running, "at": at})
        tab.at = at
