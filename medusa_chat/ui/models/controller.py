"""ModelsController: what the Models tab's events do, refused to guests."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import gradio as gr

from medusa_chat import hub
from medusa_chat.checkpoints import kept_copies
from medusa_chat.checkpoints.kept_copies import KeptCopy
from medusa_chat.errors import MedusaChatError
from medusa_chat.hub.catalog import model_preset, repo_id_of, repo_of
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.recent_models import RecentModel, RecentModels
from medusa_chat.runtime.session import Session
from medusa_chat.ui.access.guard import is_guest
from medusa_chat.ui.access.notices import inform, warn
from medusa_chat.ui.models.entries import Entry
from medusa_chat.ui.models.load_form import choices_of, request_of
from medusa_chat.ui.models.memory_fit import longest_context
from medusa_chat.ui.models.model_catalog import ModelCatalog
from medusa_chat.ui.models.picker import ModelPicker
from medusa_chat.ui.models.view import NOT_YOURS, Changes, ModelsTab, ModelsView
from medusa_chat.ui.page.html_blocks import event_field
from medusa_chat.ui.page.status import Coming


class ModelsController:
    """What the tab's events do; shared by all browser tabs, refused to guests."""

    def __init__(
        self,
        session: Session,
        catalog: ModelCatalog | None = None,
        recent: RecentModels | None = None,
    ) -> None:
        self._recent = recent
        self.catalog = catalog or ModelCatalog()
        self.picker = ModelPicker(session, self.catalog)
        self.view = ModelsView(session, self.catalog, self.picker)
        self._asked: LoadRequest | None = None  # in the header

    # ---- events ----

    def refresh(self, tab: ModelsTab, request: gr.Request, *boxes: object) -> Changes:
        """(card, rows) where they have changed; asked about twice a second by a tab in sight.
        boxes: text, backbone, precision and context, as posted."""
        if is_guest(request):
            return tab.changed("", NOT_YOURS)
        choices = choices_of(*boxes)
        self.view.measure()
        self.catalog.list_cached()
        return self.view.show(tab, choices, tab.is_still(choices.text))

    def load_model(
        self, tab: ModelsTab, event: gr.EventData, request: gr.Request, *boxes: object
    ) -> Changes:
        """Load the checkpoint whose button was pressed."""
        name = event_field(event, "id")
        return self._do(tab, request, boxes, lambda: self._begin(tab, name, *boxes[1:]))

    def load_recent(self, model: RecentModel) -> None:
        """Load a model that was loaded before, as it was then. Raises UsageError while another is
        being loaded."""
        start = self.view.start
        request = replace(model.request, device=start.device, offline=start.offline)
        self.picker.begin(request, self._entry(request).key(request.backbone))
        self._asked = request

    def coming(self, recent: Sequence[RecentModel]) -> Coming:
        """What the header says of the model that is chosen."""
        progress, loaded = self.picker.progress, self.view.session.lifecycle.loaded
        if progress.stage == "failed" and progress.request is self._asked:
            return Coming(recent, told=str(self.view.card_of(progress)["text"]))
        if not progress.is_running or (loaded is not None and progress.request == loaded):
            return Coming(recent)
        card = self.view.card_of(progress)
        return Coming(recent, " ".join(filter(None, (card["text"], card["figures"]))), card["part"])

    def halt(self, tab: ModelsTab, request: gr.Request, *boxes: object) -> Changes:
        """Cancel what is being loaded; without that, take its last outcome from the page."""
        is_running = self.picker.progress.is_running
        return self._do(
            tab, request, boxes, self.picker.cancel if is_running else self.picker.close
        )

    def drop_model(
        self, tab: ModelsTab, event: gr.EventData, request: gr.Request, *boxes: object
    ) -> Changes:
        """Delete a checkpoint from the cache: the page has asked for a second click."""
        name = event_field(event, "id")
        return self._do(tab, request, boxes, lambda: inform(self._delete(name)), warn)

    def _do(
        self,
        tab: ModelsTab,
        request: gr.Request,
        boxes: Sequence[object],
        act: Callable[[], None],
        tell: Callable[[str], None] = inform,
    ) -> Changes:
        """What the owner asked for, and what the tab shows then; a guest changes nothing."""
        if is_guest(request):
            return tab.changed("", NOT_YOURS)
        try:
            act()
        except MedusaChatError as error:
            tell(str(error))
        return self.view.show(tab, choices_of(*boxes), False)

    # ---- what they need ----

    def _begin(self, tab: ModelsTab, name: object, *boxes: object) -> None:
        """boxes: backbone, precision and context, as posted. Raises MedusaChatError."""
        request = request_of(name, boxes, self.view.start)
        entry = self._entry(request)
        key = entry.key(request.backbone)
        longest = longest_context(entry.report, entry.preset)
        posted = (key.backbone or "", *boxes[1:])
        request = request_of(name, posted, self.view.start, longest)
        self.picker.begin(request, key)
        tab.asked = request

    def _entry(self, request: LoadRequest) -> Entry:
        """What is known of the checkpoint of a load."""
        entry = Entry(request.checkpoint, model_preset(request.checkpoint))
        entry.cached = self.catalog.cached_repo(repo_id_of(entry.id))
        entry.look_beside(file.path for file in self.catalog.local)
        entry.detail = self.catalog.detail(entry.key(request.backbone))
        return entry

    def _is_in_use(self, name: str, copies: Sequence[KeptCopy]) -> bool:
        """Whether a model that is loaded or being loaded is this one, or is read from its copy."""
        used = self.view.in_use()
        made = [one for one in copies if name in (one.name, one.source)]
        return name in used or any(
            kept_copies.belongs(one, other) for one in made for other in used
        )

    def _delete(self, name: object) -> str:
        copies = kept_copies.kept()
        is_copied = any(name in (one.name, one.source) for one in copies)
        if not isinstance(name, str) or not (is_copied or hub.is_repo_id(name)):
            raise hub.HubError("choose one of the checkpoints on this disk")
        if self._is_in_use(name, copies):
            raise hub.HubError(f"{name} is in use: load another model first")
        repo = repo_of(name)  # of heads that ship the backbone is what was fetched
        if self._is_in_use(repo, copies):
            raise hub.HubError(f"{repo} is in use: load another model first")
        freed = sum(kept_copies.remove(one) for one in {name, repo})
        of = repo_id_of(name)
        if hub.is_repo_id(of) and (not freed or any(m.id == of for m in hub.cached())):
            freed += hub.remove(repo)
            if self._recent is not None:
                self._recent.forget(name)
        self.catalog.forget()
        self.catalog.cached = tuple(model for model in self.catalog.cached if model.id != of)
        self.catalog.copies = kept_copies.kept()
        return f"{name} is deleted: {hub.gb(freed)} freed."
