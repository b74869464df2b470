"""The gap of a comparison's difference, asked of the model at once."""

from medusa_chat.runtime.compare import Comparison, add_gap, gap_request
from medusa_chat.runtime.session import Session
from support.waiting import ask


def with_gap(session: Session, found: Comparison) -> Comparison:
    """The comparison with the gap of its difference, as the page asks for it; waits its turn."""
    request = gap_request(session, found)
    return found if request is None else add_gap(found, ask(session, request))
