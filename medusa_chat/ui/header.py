"""The header: brand, what the model does, Share, light or dark. The same above every tab."""

import gradio as gr

from medusa_chat.errors import UsageError
from medusa_chat.runtime.model_lifecycle import ModelState
from medusa_chat.runtime.session import Session
from medusa_chat.ui.access.guard import is_guest
from medusa_chat.ui.access.share import Share, share_view
from medusa_chat.ui.page.html_blocks import AT_ONCE, page, script_block
from medusa_chat.ui.page.status import status_line
from medusa_chat.ui.page.tree_view import to_line
from medusa_chat.ui.shell import mark

FIRST = ModelState("loading", "start")


def build_header(session: Session, share: Share) -> None:
    """Put the header into the gr.Blocks that is open; status.js has it look again every second."""
    controller = HeaderController(session, share)
    with gr.Row(elem_id="header"):
        gr.HTML(f"{mark()}<h1>medusa-chat</h1>", elem_id="brand", js_on_load=None)
        status = script_block("status", status_line(FIRST), events=["load_again", "refresh"])
        link = script_block("share", events=["begin_share", "end_share"])
        script_block("look")
        script_block("keys")
    status.load_again(controller.load_again, None, [status], **AT_ONCE)
    for event in (status.refresh, page().load):
        event(controller.refresh, None, [status, link], **AT_ONCE)
    link.begin_share(controller.begin_share, None, [link], **AT_ONCE)
    link.end_share(controller.end_share, None, [link], **AT_ONCE)


class HeaderController:
    """What the header's events do. Only the owner, never a guest, sees the link or changes it."""

    def __init__(self, session: Session, share: Share) -> None:
        self.session = session
        self.share = share

    def refresh(self, request: gr.Request) -> tuple[str, str]:
        """(status, link) as this visitor may see them."""
        return self._status(request), self._link(request)

    def load_again(self, request: gr.Request) -> str:
        """Load the model that is not there; a guest loads nothing."""
        if not is_guest(request):
            self.session.load_again()
        return self._status(request)

    def begin_share(self, event: gr.EventData, request: gr.Request) -> str:
        """Begin to make a link; the next look shows what came of it."""
        if not is_guest(request):
            try:
                self.share.begin(event._data.get("hours"))
            except (UsageError, AttributeError):
                gr.Warning("Choose how long the link lives.")
        return self._link(request)

    def end_share(self, request: gr.Request) -> str:
        """End the link at once."""
        if not is_guest(request):
            self.share.stop()
        return self._link(request)

    def _status(self, request: gr.Request) -> str:
        memory = self.session.runner.process_memory()
        return status_line(self.session.state, memory, is_guest(request))

    def _link(self, request: gr.Request) -> str:
        return "" if is_guest(request) else to_line(share_view(self.share.state))
