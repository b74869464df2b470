"""What a front end can ask of a model, besides LoadRequest and PeekRequest of messages.py.

A request goes unchanged from the front end to the worker: `Session.submit` where requests wait
for their turn (the page), `Runner.run`, `Worker.handle`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from medusa_chat.decoding.events import Event
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.messages import (
    DeviceMemory,
    LoadPhase,
    LoadRequest,
    ModelInfo,
    Prompt,
    Request,
)


@dataclass(frozen=True)
class Reply(Request[Event]):
    """Answer a conversation, or continue a raw text.

    drops_oldest: whether the oldest messages of a conversation that is too long for the context are
    left out; else that is refused. continues: whether a last message of the assistant's is
    continued; else the assistant begins another one. template_options: what the chat template is
    told besides the messages. logprobs: log probabilities of each token with so many others; None
    for none.
    """

    prompt: Prompt
    settings: GenerationSettings
    drops_oldest: bool = False
    continues: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None


@dataclass(frozen=True)
class Tune(Request[ModelInfo]):
    """Time the model's steps and choose the auto tree by them. The model as it is then comes
    back, or nothing when the timing was stopped. again: also where the times are known."""

    again: bool = True


@dataclass(frozen=True)
class MeasureMemory(Request[DeviceMemory]):
    """How much memory of a device the next model may take."""

    device: str = "auto"


@dataclass(frozen=True)
class Switch(Request[LoadPhase]):
    """Load another model, and where that leaves none, the one before it again. Submitted to a
    session, which asks its worker for the loads."""

    load: LoadRequest
