"""What waits in a session's queue, and what the page shows of the model."""

import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Literal

from medusa_chat.decoding.events import Event
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.messages import LoadRequest, ModelInfo, Peek, PeekRequest, PersonalTree, Prompt


@dataclass(eq=False)
class Job:
    """One answer asked for: its place in the queue and its append-only trace."""

    prompt: Prompt
    settings: GenerationSettings
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    trace: list[Event] = field(default_factory=list)
    state: Literal["waiting", "running", "finished"] = "waiting"
    error: str = ""
    is_cancelled: bool = False
    asked_at: float = field(default_factory=time.monotonic)
    first_seconds: float | None = None  # from asking to the first event, waiting included
    done: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """Nothing comes any more."""
        self.state = "finished"
        self.done.set()


@dataclass(eq=False)
class Look:
    """A PeekRequest that waits its turn: once done, its peek, or else an error."""

    request: PeekRequest
    peek: Peek | None = None
    error: str = ""
    is_cancelled: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """The answer is there, or why there is none."""
        self.done.set()


@dataclass(eq=False)
class Switch:
    """Another model asked for while the app runs. Once done, it is loaded, or error says why not
    and the model before it is loaded again."""

    request: LoadRequest
    state: Literal["waiting", "running", "finished"] = "waiting"
    model: ModelInfo | None = None
    error: str = ""
    is_cancelled: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """Nothing of it comes any more."""
        self.state = "finished"
        self.done.set()


@dataclass(eq=False)
class Tune:
    """A change of the auto tree that waits its turn: step times measured anew, or another tree
    (None: the checkpoint's own) where is_measuring is false. Once done, the model it made, or
    else an error."""

    is_measuring: bool
    tree: PersonalTree | None = None
    state: Literal["waiting", "running", "finished"] = "waiting"
    model: ModelInfo | None = None
    error: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """Nothing of it comes any more."""
        self.state = "finished"
        self.done.set()


class Weigh:
    """A turn in the queue for looking how much memory there is."""


@dataclass(frozen=True)
class ModelState:
    """What the page shows of the model. message: why it "failed" and what to do; why it is
    "loading" when the worker's end is the reason; while "ready" or "empty", why the last load did
    not bring another one. done, total, rate: of a download, as in LoadPhase."""

    status: Literal["empty", "loading", "ready", "failed"] = "empty"
    phase: str = ""
    message: str = ""
    model: ModelInfo | None = None
    done: int = 0
    total: int = 0
    rate: float = 0.0
