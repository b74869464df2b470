"""What a front end can ask of a model, besides LoadRequest and PeekRequest of messages.py.

A request goes unchanged from the front end to the worker: `Session.submit` where requests wait
for their turn (the page), `Runner.run`, `Worker.handle`.
"""

from dataclasses import dataclass

from medusa_chat.decoding.events import Event
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.messages import (
    DeviceMemory,
    LoadPhase,
    LoadRequest,
    Prompt,
    Request,
)


@dataclass(frozen=True)
class Reply(Request[Event]):
    """Answer a conversation, or continue a raw text. drops_oldest: whether the oldest messages of a
    conversation that is too long for the context are left out; else that is refused."""

    prompt: Prompt
    settings: GenerationSettings
    drops_oldest: bool = False


@dataclass(frozen=True)
class MeasureMemory(Request[DeviceMemory]):
    """How much memory of a device the next model may take."""

    device: str = "auto"


@dataclass(frozen=True)
class Switch(Request[LoadPhase]):
    """Load another model, and where that leaves none, the one before it again. Submitted to a
    session, which asks its worker for the loads."""

    load: LoadRequest
