"""The Models tab: choose a checkpoint, see what it needs before any click, download and load it."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from medusa_chat import hub
from medusa_chat.checkpoints.devices import this_cpu
from medusa_chat.errors import MedusaChatError
from medusa_chat.hub.catalog import model_preset, model_presets
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.session import Session
from medusa_chat.ui.access.guard import is_guest
from medusa_chat.ui.models.load_form import Asked, asked_of, request_of
from medusa_chat.ui.models.load_view import loaded_view, pick_view
from medusa_chat.ui.models.memory_fit import DEFAULT_CONTEXT, Machine, longest_context, memory_line
from medusa_chat.ui.models.model_catalog import Key, ModelCatalog, Place
from medusa_chat.ui.models.picker import Picker
from medusa_chat.ui.models.rows import Entry, Groups, grouped, row_view
from medusa_chat.ui.page.html_blocks import AT_ONCE, drawn
from medusa_chat.ui.page.status import phase_text
from medusa_chat.ui.page.tree_view import to_line

STILL_SECONDS = 0.5  # a text is looked up once nobody types any more
WEIGH_SECONDS = 5.0
MOST_FOUND = 30  # of a search: more are found by another word
PRECISIONS = ["auto", "fp32", "bf16", "fp16", "int8", ("nf4 (4 bit)", "nf4")]
CONTEXTS = [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
NVIDIA = Path("/proc/driver/nvidia/version")  # with the driver there is a GPU, most likely
NOT_YOURS = to_line(
    {"guest": "Which model answers is chosen by the person who shared this page.", "rows": []}
)


@dataclass
class Seen:
    """One browser tab: what it shows already, and since when its text is what it is."""

    card: str = ""
    rows: str = ""
    text: str = ""
    since: float = 0.0


class ModelsController:
    """What the tab's events do; shared by all browser tabs, refused to guests."""

    def __init__(self, session: Session, shelf: ModelCatalog | None = None) -> None:
        self.session = session
        self.shelf = shelf or ModelCatalog()
        self.picker = Picker(session, self.shelf)
        self.start = session.requested or LoadRequest()
        self.cpu = this_cpu()
        self._weighed_at = float("-inf")

    # ---- events ----

    def look(
        self,
        seen: Seen,
        text: object,
        backbone: object,
        precision: object,
        context: object,
        request: gr.Request,
    ) -> tuple[Any, Any]:
        """(card, rows) where they have changed; asked about twice a second by a tab in sight."""
        if is_guest(request):
            return self._changed(seen, "", NOT_YOURS)
        asked = asked_of(text, backbone, precision, context)
        if asked.text != seen.text:
            seen.text, seen.since = asked.text, time.monotonic()
        is_still = not asked.text or time.monotonic() >= seen.since + STILL_SECONDS
        self._weigh()
        self.shelf.stand(self._place())
        self.shelf.list_cached()
        return self._show(seen, asked, is_still)

    def take(
        self,
        seen: Seen,
        text: object,
        backbone: object,
        precision: object,
        context: object,
        event: gr.EventData,
        request: gr.Request,
    ) -> tuple[Any, Any]:
        """Load the checkpoint whose button was pressed."""
        if is_guest(request):
            return self._changed(seen, "", NOT_YOURS)
        try:
            self._begin(_id_of(event), backbone, precision, context)
        except MedusaChatError as error:
            gr.Info(str(error))
        return self._show(seen, asked_of(text, backbone, precision, context), False)

    def halt(
        self,
        seen: Seen,
        text: object,
        backbone: object,
        precision: object,
        context: object,
        request: gr.Request,
    ) -> tuple[Any, Any]:
        """Cancel what is being loaded; without that, take its last outcome from the page."""
        if is_guest(request):
            return self._changed(seen, "", NOT_YOURS)
        if self.picker.pick.is_running:
            self.picker.cancel()
        else:
            self.picker.close()
        return self._show(seen, asked_of(text, backbone, precision, context), False)

    def drop_model(
        self,
        seen: Seen,
        text: object,
        backbone: object,
        precision: object,
        context: object,
        event: gr.EventData,
        request: gr.Request,
    ) -> tuple[Any, Any]:
        """Delete a checkpoint from the cache: the page has asked for a second click."""
        if is_guest(request):
            return self._changed(seen, "", NOT_YOURS)
        try:
            gr.Info(self._delete(_id_of(event)))
        except MedusaChatError as error:
            gr.Warning(str(error))
        return self._show(seen, asked_of(text, backbone, precision, context), False)

    # ---- what they need ----

    def _begin(self, name: object, *boxes: object) -> None:
        """boxes: backbone, precision and context, as posted. Raises MedusaChatError."""
        request = request_of(name, boxes, self.start)
        entry = Entry(request.checkpoint, model_preset(request.checkpoint))
        entry.detail = self.shelf.detail(entry.key(request.backbone))
        key = entry.key(request.backbone)
        longest = longest_context(entry.report, entry.preset)
        posted = (key.backbone or "", *boxes[1:])
        self.picker.begin(request_of(name, posted, self.start, longest), key)

    def _delete(self, name: object) -> str:
        if not isinstance(name, str) or not hub.is_repo_id(name):
            raise hub.HubError("choose one of the checkpoints on this disk")
        if name in self._in_use():
            raise hub.HubError(f"{name} is in use: load another model first")
        freed = hub.remove(name)
        self.shelf.forget()
        self.shelf.cached = tuple(model for model in self.shelf.cached if model.id != name)
        return f"{name} is deleted: {hub.gb(freed)} are free again."

    def _show(self, seen: Seen, asked: Asked, is_still: bool) -> tuple[Any, Any]:
        text = "" if asked.names_one else asked.text
        search = self.shelf.search(text) if is_still else None
        found = search.rows if hub.is_offline() and search else self.shelf.found(text)
        groups = grouped(asked, model_presets(), self.shelf.cached, found[:MOST_FOUND])
        self._fill(groups, asked, is_still)
        machine = self._machine()
        view = {
            "rows": [row_view(group, entry, asked, machine) for group, entry in groups.all()],
            "memory": memory_line(self.session.memory),
            "search": search.state if search else "asking",
            "said": self._said(search.error if search else ""),
        }
        return self._changed(seen, to_line(self._card()), to_line(view))

    def _fill(self, groups: Groups, asked: Asked, is_still: bool) -> None:
        """What is known goes into the entries, what is not is looked up behind the page."""
        for _, entry in groups.all():
            entry.detail = self.shelf.detail(entry.key(asked.backbone))
        if not is_still:
            return
        first = [*groups.typed, *groups.here, *groups.known, *groups.found]
        keys = [entry.key(asked.backbone) for entry in first]
        current = self._current()
        self.shelf.want([*keys[:1], *([current] if current else []), *keys[1:]])

    def _card(self) -> dict[str, Any]:
        """How a load goes, and the model that is there."""
        pick, state = self.picker.pick, self.session.state
        is_queued = pick.switch is not None and pick.switch.state == "waiting"
        ahead = self.session.position(pick.switch) if is_queued and pick.switch else 0
        current = self._current()
        detail = self.shelf.detail(current) if current else None
        loaded = loaded_view(state.model, self.session.loaded, detail)
        return pick_view(pick, ahead, phase_text(state)) | {"loaded": loaded}

    def _said(self, error: str) -> str:
        """Why less is shown than there may be."""
        if hub.is_offline():
            return "The network is off: only what is known and what is on this disk is shown."
        return error or self.shelf.trouble

    def _machine(self) -> Machine:
        loaded = self.session.loaded
        return Machine(
            memory=self.session.memory,
            place=self.shelf.place,
            is_online=self.shelf.is_online(),
            context=self.start.max_context or DEFAULT_CONTEXT,
            in_use=self._in_use(),
            loaded=loaded.checkpoint if loaded else "",
        )

    def _place(self) -> Place:
        """Where a model would go: as its process says, before that as it seems from here."""
        device = self.start.device
        if self.session.memory is not None:
            device = self.session.memory.device
        elif device == "auto":
            device = "cuda" if NVIDIA.exists() else "cpu"
        return Place("cuda" if device.startswith("cuda") else device, self.cpu)

    def _current(self) -> Key | None:
        """What is looked up of the model that is loaded."""
        request = self.session.loaded
        return Key(request.checkpoint, request.backbone) if request else None

    def _in_use(self) -> frozenset[str]:
        """Names that must not be deleted: loaded or being loaded, with the bases."""
        names: set[str | None] = set()
        if (key := self._current()) is not None:
            detail = self.shelf.detail(key)
            names |= {*key, detail.report.backbone if detail and detail.report else None}
        if self.picker.pick.is_running and (request := self.picker.pick.request):
            detail = self.picker.pick.detail
            needs = detail.needs if detail else None
            names |= {request.checkpoint, request.backbone, needs.base if needs else None}
        return frozenset(filter(None, names))

    def _weigh(self) -> None:
        if time.monotonic() > self._weighed_at + WEIGH_SECONDS:
            self._weighed_at = time.monotonic()
            self.session.measure_memory()

    def _changed(self, seen: Seen, card: str, rows: str) -> tuple[Any, Any]:
        """Only what this tab does not show yet."""
        card_now = gr.skip() if card == seen.card else card
        rows_now = gr.skip() if rows == seen.rows else rows
        seen.card, seen.rows = card, rows
        return card_now, rows_now


def build_models(session: Session, shelf: ModelCatalog | None = None) -> ModelsController:
    """Put the Models tab into the gr.Blocks that is open."""
    desk = ModelsController(session, shelf)
    seen = gr.State(Seen())
    with gr.Column(elem_id="models-column"):
        card = drawn("pick")
        with gr.Row(elem_id="models-ask"):
            boxes = _boxes()
        rows = drawn("models", first_rows())
    inputs, outputs = [seen, *boxes], [card, rows]
    rows.look(desk.look, inputs, outputs, **AT_ONCE)
    rows.take(desk.take, inputs, outputs, **AT_ONCE)
    rows.drop_model(desk.drop_model, inputs, outputs, **AT_ONCE)
    card.halt(desk.halt, inputs, outputs, **AT_ONCE)
    return desk


def first_rows() -> str:
    """What is shown before anything is looked up: the presets, at once and offline."""
    groups, asked = grouped(Asked(), model_presets(), (), ()), Asked()
    rows = [row_view(group, entry, asked, Machine()) for group, entry in groups.all()]
    return to_line({"rows": rows, "memory": "", "search": "asking", "said": ""})


def _boxes() -> list[gr.components.Component]:
    """In the order in which events post them."""
    text = gr.Textbox(
        elem_id="models-text",
        label="Search, or a Hub id, or a folder",
        placeholder="vicuna, or owner/name, or ~/models/mine",
        max_lines=1,
        scale=4,
        min_width=240,
    )
    backbone = gr.Textbox(
        elem_id="models-backbone",
        label="Another backbone for the heads",
        placeholder="the one they were trained for",
        max_lines=1,
        scale=3,
        min_width=200,
    )
    precision = gr.Dropdown(
        PRECISIONS, value="auto", elem_id="models-precision", label="Precision", min_width=120
    )
    contexts = [("auto", "auto"), *((f"{count:,}", str(count)) for count in CONTEXTS)]
    context = gr.Dropdown(
        contexts, value="auto", elem_id="models-context", label="Context, at most", min_width=120
    )
    return [text, backbone, precision, context]


def _id_of(event: gr.EventData) -> object:
    """Which row it was; None when the event names none."""
    data = getattr(event, "_data", None)
    return data.get("id") if isinstance(data, dict) else None
