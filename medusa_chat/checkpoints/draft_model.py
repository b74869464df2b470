"""The draft model of a load: found, compared with the backbone, and read to draft for it."""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

from medusa_chat.checkpoints import weights
from medusa_chat.checkpoints.device_plan import DevicePlan, plan_device
from medusa_chat.checkpoints.devices import held_bytes
from medusa_chat.checkpoints.fetch import fetch
from medusa_chat.checkpoints.gguf_settings import with_settings
from medusa_chat.checkpoints.locate import Checkpoint, News
from medusa_chat.checkpoints.prepare import prepare
from medusa_chat.checkpoints.tokenizer import read_tokenizer
from medusa_chat.checkpoints.weight_storage import keep_of, read_dtype
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.drafters.draft_model import DraftModel
from medusa_chat.decoding.step import TorchStep
from medusa_chat.errors import ModelError
from medusa_chat.messages import LoadRequest
from medusa_chat.units import number


@dataclass(frozen=True)
class ReadDraft:
    """A draft model on its device. parameters: a 4-bit weight holds two. bytes: of its weights and
    its cache."""

    name: str
    drafter: DraftModel
    parameters: int
    bytes: int
    notes: tuple[str, ...]


def fetch_draft(request: LoadRequest) -> Generator[News, None, Checkpoint | None]:
    """Find the draft model that a request names, and download what is missing; None without one.
    Raises as fetch does."""
    if request.draft is None:
        return None
    return (yield from fetch(LoadRequest(request.draft, offline=request.offline), False))


def require_vocabulary(draft: Checkpoint, found: Checkpoint) -> None:
    """Raises ModelError where the draft model has another vocabulary than the backbone. One in a
    folder without a tokenizer has the backbone's if they have as many tokens."""
    draft = with_settings(draft)
    ours, theirs = (int(_text_config(one).vocab_size) for one in (found, draft))
    if not draft.weights.stored and not draft.weights.has_tokenizer:
        if ours == theirs:
            return
        raise ModelError(
            f"the draft model {draft.name} has a vocabulary of {theirs} tokens and the backbone "
            f"one of {ours}: give one with the same tokenizer as --draft"
        )
    own = read_tokenizer(found.settings, ours).get_vocab()
    drafted = read_tokenizer(draft.settings, theirs).get_vocab()
    if own == drafted:
        return
    apart = sum(drafted.get(text) != id for text, id in own.items())
    raise ModelError(
        f"the draft model {draft.name} has another tokenizer than the backbone ({apart:,} of "
        f"{len(own):,} tokens differ): give one with the same as --draft"
    )


def _text_config(found: Checkpoint) -> Any:
    return weights.config_of(found).get_text_config()


def read_draft(
    request: LoadRequest, draft: Checkpoint, backbone: Backbone, parameters: int, plan: DevicePlan
) -> ReadDraft:
    """Read the draft model, once the backbone is in memory. parameters: the backbone's; plan: its
    device. Raises ModelError for a draft model that is not smaller, and as a load does."""
    draft = with_settings(draft)
    config = weights.config_of(draft)
    longest = int(getattr(config.get_text_config(), "max_position_embeddings", None) or 0)
    context = min(backbone.context, longest or backbone.context)
    asked = LoadRequest(draft.name, None, "auto", request.device, context, request.offline)
    if plan.device_map is None:
        asked = replace(asked, device=str(plan.device))
    own = plan_device(asked, draft, config)
    keep = keep_of(draft, own)
    model, _ = weights.read_backbone(
        draft,
        config,
        own.precision,
        own.device,
        own.device_map,
        dtype=read_dtype(draft, keep),
        is_packed=own.is_packed,
    )
    count = model.num_parameters()
    if count >= parameters:
        raise ModelError(
            f"the draft model {draft.name} has {number(count)} parameters and the backbone "
            f"{number(parameters)}: give a smaller one as --draft"
        )
    is_spread = own.device_map is not None
    backend, _ = prepare(model, None, own.device, own.context, is_spread=is_spread, keep=keep)
    by_torch = backend if isinstance(backend, TorchStep) else TorchStep(backend.backbone)
    drafter = DraftModel(by_torch, backbone.vocabulary)
    held = held_bytes(model, *by_torch.backbone.beside) + by_torch.backbone.cache.nbytes
    note = (
        f"{draft.name} drafts, {number(count)} parameters in {own.precision}: each of its passes "
        f"runs by {by_torch.name}"
    )
    return ReadDraft(draft.name, drafter, count, held, (note,))
