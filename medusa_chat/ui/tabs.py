"""The page's parts: a header, the same above every tab, and Chat, Compare, Models and Tune."""

from collections.abc import Sequence

import gradio as gr

from medusa_chat.errors import MedusaChatError, UsageError
from medusa_chat.runtime.history import History
from medusa_chat.runtime.model_lifecycle import ModelState
from medusa_chat.runtime.recent_models import RecentModel, RecentModels
from medusa_chat.runtime.session import Session
from medusa_chat.ui.access.guard import is_guest
from medusa_chat.ui.access.notices import inform, warn
from medusa_chat.ui.access.share import Share, share_view
from medusa_chat.ui.chat.controller import ChatController
from medusa_chat.ui.chat.tab import build_chat
from medusa_chat.ui.compare.tab import build_compare
from medusa_chat.ui.models.controller import ModelsController
from medusa_chat.ui.models.rows import offer
from medusa_chat.ui.models.tab import build_models
from medusa_chat.ui.page.html_blocks import AT_ONCE, event_field, page, script_block
from medusa_chat.ui.page.inputs import whole_number
from medusa_chat.ui.page.shell import mark
from medusa_chat.ui.page.status import shown_name, status_line
from medusa_chat.ui.page.tree_view import to_line
from medusa_chat.ui.tune.tab import build_tune

FIRST = ModelState("loading", "start")
STATUS_EVENTS = ("refresh", "load_again", "load_recent", "halt")


def build_header(
    session: Session, share: Share, models: ModelsController, recent: RecentModels | None = None
) -> None:
    """Put the header into the gr.Blocks that is open; status.js has it look again every second."""
    controller = HeaderController(session, share, models, recent)
    with gr.Row(elem_id="header"):
        gr.HTML(f"{mark()}<h1>medusa-chat</h1>", elem_id="brand", js_on_load=None)
        status = script_block("status", status_line(FIRST), events=STATUS_EVENTS)
        link = script_block("share", events=["begin_share", "end_share"])
        script_block("look")
        script_block("keys")
    for event, act in (
        (status.load_again, controller.load_again),
        (status.load_recent, controller.load_recent),
        (status.halt, controller.halt),
    ):
        event(act, None, [status], **AT_ONCE)
    for event in (status.refresh, page().load):
        event(controller.refresh, None, [status, link], **AT_ONCE)
    link.begin_share(controller.begin_share, None, [link], **AT_ONCE)
    link.end_share(controller.end_share, None, [link], **AT_ONCE)


class HeaderController:
    """What the header's events do. Only the owner, never a guest, sees the link or changes it."""

    def __init__(
        self,
        session: Session,
        share: Share,
        models: ModelsController,
        recent: RecentModels | None = None,
    ) -> None:
        self.session = session
        self.share = share
        self.models = models
        self.recent = recent

    def refresh(self, request: gr.Request) -> tuple[str, str]:
        """(status, link) as this visitor may see them."""
        return self._status(request), self._link(request)

    def load_again(self, request: gr.Request) -> str:
        """Load the model that is not there; a guest loads nothing."""
        if not is_guest(request):
            self.session.load_again()
        return self._status(request)

    def load_recent(self, event: gr.EventData, request: gr.Request) -> str:
        """Load one of the recent models; place: in the list that was shown, name: there."""
        place, name = whole_number(event_field(event, "place")), event_field(event, "name")
        recent = self._recent()
        if not is_guest(request) and place is not None and place < len(recent):
            try:
                if name == shown_name(recent[place].name):
                    self.models.load_recent(recent[place])
            except MedusaChatError as error:
                inform(str(error))
        return self._status(request)

    def halt(self, request: gr.Request) -> str:
        """Cancel what is being loaded."""
        if not is_guest(request):
            self.models.picker.cancel()
        return self._status(request)

    def begin_share(self, event: gr.EventData, request: gr.Request) -> str:
        """Begin to make a link; the next look shows what came of it."""
        if not is_guest(request):
            try:
                self.share.begin(event._data.get("hours"))
            except (UsageError, AttributeError):
                warn("Choose how long the link lives.")
        return self._link(request)

    def end_share(self, request: gr.Request) -> str:
        """End the link at once."""
        if not is_guest(request):
            self.share.stop()
        return self._link(request)

    def _status(self, request: gr.Request) -> str:
        memory = self.session.runner.process_memory()
        if is_guest(request):
            return status_line(self.session.state, memory, True)
        return status_line(self.session.state, memory, False, self.models.coming(self._recent()))

    def _recent(self) -> list[RecentModel]:
        """The models that can be loaded again; not the one that is there."""
        loaded = self.session.lifecycle.loaded
        there = RecentModel.kept_of(loaded) if loaded and self.session.state.model else None
        every = self.recent.all() if self.recent else []
        return [one for one in every if one.request != there]

    def _link(self, request: gr.Request) -> str:
        return "" if is_guest(request) else to_line(share_view(self.share.state))


def build_app(
    session: Session,
    trees: Sequence[str],
    share: Share,
    history: History | None = None,
    recent: RecentModels | None = None,
) -> tuple[gr.Blocks, ChatController]:
    """The page over a session, and its chat controller. trees: presets offered beside "auto"."""
    models = ModelsController(session, recent=recent)
    with gr.Blocks(title="medusa-chat", analytics_enabled=False, fill_width=True) as blocks:
        build_header(session, share, models, recent)
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Chat", id="chat", elem_id="chat"):
                controller, state = build_chat(session, trees, history, offer())
                share.on_end.append(controller.sessions.end_guests)
            with gr.Tab("Compare", id="compare", elem_id="compare-tab"):
                build_compare(session, trees, state, controller.last_message)
            with gr.Tab("Models", id="models", elem_id="models-tab"):
                build_models(models)
            with gr.Tab("Tune", id="tune", elem_id="tune-tab"):
                build_tune(session)
    return blocks, controller
