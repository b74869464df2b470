"""RecentModels: the models that were loaded last, newest first, in a file of the data folder."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from medusa_chat import paths
from medusa_chat.checkpoints.places import on_disk
from medusa_chat.messages import LoadRequest, ModelInfo

FILE = "models.json"
MOST = 8  # models in the list
LONGEST = 1000  # characters of a name or a path
NAMES = ("checkpoint", "backbone", "precision", "max_context")  # kept of a load, with drafts
PLACES = ("checkpoint", "backbone")
TEXTS = ("name", "made", "device")
DAMAGE = (ValueError, KeyError, TypeError, RecursionError)  # of a file or an entry


@dataclass(frozen=True)
class RecentModel:
    """One model. request: the load, without the device, which belongs to the machine. name, made,
    device: what was loaded, in words; made is its precision. has_ended: whether the process ended
    while this model was loaded at the start of the program."""

    request: LoadRequest
    name: str
    made: str = ""
    device: str = ""
    has_ended: bool = False

    @classmethod
    def of(cls, request: LoadRequest, model: ModelInfo) -> Self:
        """What is kept of a model that was loaded."""
        return cls(cls.kept_of(request), model.name, model.precision, model.device)

    @staticmethod
    def kept_of(request: LoadRequest) -> LoadRequest:
        """What is kept of a load: paths from the root, as the next start may be in another
        folder, where a relative one could pass for a Hub id."""
        kept = {name: getattr(request, name) for name in NAMES}
        kept |= {name: on_disk(kept[name]) for name in PLACES if kept[name]}
        return LoadRequest(**kept, drafts=tuple(map(on_disk, request.drafts)))

    def at_start(self, request: LoadRequest) -> LoadRequest:
        """The load of this model by a program that is started with `request`, whose options win;
        nobody asked for it now, so nothing is downloaded."""
        own = self.request
        return replace(
            request,
            checkpoint=own.checkpoint,
            backbone=own.backbone,
            drafts=own.drafts,
            offline=True,
            precision=own.precision if request.precision == "auto" else request.precision,
            max_context=request.max_context or own.max_context,
        )

    def to_json(self) -> dict[str, Any]:
        """The model as the file has it."""
        own = {name: getattr(self, name) for name in (*TEXTS, "has_ended")}
        kept = {name: getattr(self.request, name) for name in NAMES}
        return kept | {"drafts": list(self.request.drafts)} | own

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Read what was written, strictly. Raises ValueError, KeyError or TypeError."""
        request = {name: values[name] for name in NAMES}
        texts = [values[name] for name in TEXTS]
        tokens = request["max_context"]
        named = [request["checkpoint"], request["precision"], *texts]
        drafts, backbone = _drafts(values), request["backbone"]
        others = drafts if backbone is None else (*drafts, backbone)
        if not all(isinstance(text, str) and len(text) <= LONGEST for text in (*named, *others)):
            raise ValueError("a name is no text")
        if tokens is not None and (type(tokens) is not int or tokens < 1):
            raise ValueError("a context is no whole number")
        if not request["checkpoint"]:
            raise ValueError("a model has no name")
        load, (name, made, device) = LoadRequest(**request, drafts=drafts), texts
        return cls(load, name, made, device, values["has_ended"] is True)


def _drafts(values: Any) -> tuple[Any, ...]:
    """What drafts beside a model of the file; before there could be two, one name or null. Raises
    KeyError or TypeError."""
    if "drafts" not in values:
        return () if values["draft"] is None else (values["draft"],)
    if not isinstance(values["drafts"], list):
        raise TypeError("the drafters are no list")
    return tuple(values["drafts"])


class RecentModels:
    """The list of a data folder. A failure stops nothing: it is reported once, through `tell`.

    While a program loads the last model at its start, a mark lies beside the file, and its lock is
    held: a mark without a holder means that the program was ended by it.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None] = lambda line: None) -> None:
        self.file = folder / FILE
        self._mark = folder / f"{FILE}.starting"
        self._lock = FileLock(f"{self.file}.lock", timeout=0, thread_local=False)
        self._tell = tell
        self._said: set[str] = set()  # the page reads the list every second

    def all(self) -> list[RecentModel]:
        """The models, newest first; what is damaged is left out, and reported."""
        models = list[RecentModel]()
        try:
            values = json.loads(self.file.read_text(encoding="utf-8"))["models"]
        except FileNotFoundError:
            return models
        except (OSError, *DAMAGE) as error:
            self._say(f"the list of recent models cannot be read ({error}): check {self.file}")
            return models
        for one in values if isinstance(values, list) else [values]:
            try:
                models.append(RecentModel.from_json(one))
            except DAMAGE as error:
                self._say(f"a recent model cannot be read ({error}): check {self.file}")
        return models[:MOST]

    def last(self) -> RecentModel | None:
        """The model to begin with; None for the demo: there is no other, or it ended its process
        at an earlier start."""
        newest = next(iter(self.all()), None)
        is_wanted = newest and newest.request.checkpoint != "demo" and not newest.has_ended
        return newest if is_wanted else None

    def note(self, request: LoadRequest, model: ModelInfo) -> None:
        """Put a model that was loaded first; one that could not be read again is not kept."""
        new = RecentModel.of(request, model)
        try:
            RecentModel.from_json(new.to_json())
        except ValueError:
            return
        self._write([new, *(one for one in self.all() if one.request != new.request)][:MOST])

    def forget(self, checkpoint: str) -> None:
        """Take a checkpoint that was deleted off the list, and all files of a repo with it."""
        every = self.all()
        left = [
            one for one in every if not f"{one.request.checkpoint}/".startswith(f"{checkpoint}/")
        ]
        if left != every:
            self._write(left)

    def note_end(self, model: RecentModel) -> None:
        """The process ended while it was loaded: no later start begins with it."""
        ended = replace(model, has_ended=True)
        self._write([ended if one.request == model.request else one for one in self.all()])

    def begin(self) -> bool:
        """The last model is loaded now -> whether that has ended a program before."""
        try:
            self._lock.acquire()
        except (Timeout, OSError, NotImplementedError):
            return False  # another program does the same now, or the folder has no locks
        has_ended = self._mark.exists()
        with suppress(OSError):
            self._mark.touch()
        return has_ended

    def end(self) -> None:
        """That load has ended, and this program with it or not."""
        if self._lock.is_locked:
            with suppress(OSError):
                self._mark.unlink(missing_ok=True)
            self._lock.release()

    def _write(self, models: list[RecentModel]) -> None:
        values = {"models": [one.to_json() for one in models]}
        try:
            paths.write_text(self.file, json.dumps(values, ensure_ascii=False, indent=1))
        except (OSError, UnicodeError) as error:
            self._say(f"the list of recent models cannot be written ({error}): check {self.file}")

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._tell(line)
