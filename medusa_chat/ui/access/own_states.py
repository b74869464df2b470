"""OwnStates: what Gradio keeps of a browser tab, out of reach for whoever did not open it."""

from gradio import Blocks
from gradio.state_holder import SessionState, StateHolder
from starlette.exceptions import HTTPException

from medusa_chat.ui.access.guard import ASKER

ANOTHERS = "this tab is another visitor's: load the page again"


class OwnStates(StateHolder):
    """The tabs' states, by the name that a browser made up for each; that name is all it posts, so
    each state belongs to the first asker. Every event passes here before it is queued or run."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self.set_blocks(blocks)

    def __getitem__(self, session_id: str) -> SessionState:
        """The state of a tab. Raises HTTPException where it is another asker's."""
        state: SessionState = super().__getitem__(session_id)
        asker = ASKER.get()
        if asker is not None and state.__dict__.setdefault("asker", asker) != asker:
            raise HTTPException(403, ANOTHERS)
        return state
