"""What drafts beside the backbone of a load: found, compared with it, and read to draft for it.

It is one or two smaller models with the same tokenizer, or a drafter that was trained on the
backbone.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from medusa_chat.checkpoints import native_build, weights
from medusa_chat.checkpoints.device_plan import DevicePlan, plan_device
from medusa_chat.checkpoints.devices import held_bytes, native_threads
from medusa_chat.checkpoints.dflash_weights import read_dflash
from medusa_chat.checkpoints.drafter_reading import TEXT, best_reading
from medusa_chat.checkpoints.drafter_weights import pack
from medusa_chat.checkpoints.eagle_weights import read_eagle
from medusa_chat.checkpoints.fetch import fetch, fetch_files
from medusa_chat.checkpoints.gguf_settings import with_settings
from medusa_chat.checkpoints.layouts.dflash_file import DFlashFile
from medusa_chat.checkpoints.layouts.drafter_file import DrafterFile, Sizes
from medusa_chat.checkpoints.layouts.drafters import drafter_in
from medusa_chat.checkpoints.layouts.eagle_file import EagleFile
from medusa_chat.checkpoints.layouts.hydra_file import HydraFile
from medusa_chat.checkpoints.layouts.mlp_file import MlpFile
from medusa_chat.checkpoints.layouts.source import Source
from medusa_chat.checkpoints.locate import Checkpoint, News
from medusa_chat.checkpoints.path_head_weights import read_hydra, read_mlp
from medusa_chat.checkpoints.places import folder_or_repo, opened
from medusa_chat.checkpoints.prepare import prepare
from medusa_chat.checkpoints.tokenizer import read_tokenizer
from medusa_chat.checkpoints.weight_storage import keep_of, read_dtype
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.cuda_graph_step import CudaGraphStep
from medusa_chat.decoding.backends.native_library import NativeLibrary
from medusa_chat.decoding.drafters.dflash import DFlash
from medusa_chat.decoding.drafters.draft_model import DraftModel
from medusa_chat.decoding.drafters.drafter import Drafter
from medusa_chat.decoding.drafters.eagle import Eagle
from medusa_chat.decoding.drafters.own_layers import Lent
from medusa_chat.decoding.drafters.pair import Pair
from medusa_chat.decoding.drafters.path_heads import PathHeads
from medusa_chat.decoding.step import TorchStep
from medusa_chat.errors import ModelError, UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.units import number


@dataclass(frozen=True)
class ReadDraft:
    """A drafter on its device. names: of its files. parameters: a 4-bit weight holds two. bytes: of
    its weights and its cache."""

    names: tuple[str, ...]
    drafter: Drafter
    parameters: int
    bytes: int
    notes: tuple[str, ...]

    @classmethod
    def of_both(cls, first: "ReadDraft", second: "ReadDraft") -> "ReadDraft":
        """Two draft models as one. parameters: of the first, whose passes are counted."""
        cost = second.parameters / first.parameters
        return cls(
            (*first.names, *second.names),
            Pair(first.drafter, second.drafter, cost),
            first.parameters,
            first.bytes + second.bytes,
            (*first.notes, *second.notes),
        )


def refuse_drafts(request: LoadRequest) -> None:
    """Raises UsageError for more drafters than can draft together, or one given twice, and
    ModelError for a name that can be none; nothing is read."""
    names = request.drafts
    if len(names) > 2:
        raise UsageError(f"--draft is given {len(names)} times: give one drafter, or two models")
    if len(names) == 2:
        one, other = (p.resolve() if isinstance(p := folder_or_repo(n), Path) else p for n in names)
        if one == other:
            raise UsageError(f"--draft names {names[0]} twice: give another model, or only one")


def fetch_drafts(
    request: LoadRequest, found: Checkpoint
) -> Generator[News, None, list[Checkpoint | DrafterFile]]:
    """Find what a request names to draft, and download what is missing. found: the backbone. Raises
    as fetch does, and ModelError for a drafter of another backbone, and one that should draft
    beside another, before anything is downloaded."""
    made = list[Checkpoint | DrafterFile]()
    for name in request.drafts:
        made.append((yield from _fetch_draft(name, request, found)))
    return made


def _fetch_draft(
    name: str, request: LoadRequest, found: Checkpoint
) -> Generator[News, None, Checkpoint | DrafterFile]:
    config = _text_config(found)
    layers, tokens = int(config.num_hidden_layers), int(config.vocab_size)
    sizes = Sizes(int(config.hidden_size), layers, tokens)

    def fitting(source: Source) -> DrafterFile | None:
        drafter = drafter_in(source)
        if drafter is not None:
            drafter.refuse_other(sizes)
            if len(request.drafts) > 1:
                raise ModelError(
                    f"{name} is {drafter.noun}, which drafts alone: give it as the only --draft, "
                    "or two draft models"
                )
        return drafter

    def require(source: Source) -> None:
        fitting(source)

    place = yield from fetch_files(name, request.offline, require)
    drafter = fitting(opened(place))
    if drafter is not None:
        return drafter
    return (yield from fetch(LoadRequest(name, offline=request.offline), False))


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


def read_drafts(
    request: LoadRequest,
    drafts: Sequence[Checkpoint | DrafterFile],
    model: Any,
    tokenizer: Any,
    backbone: Backbone,
    parameters: int,
    plan: DevicePlan,
) -> ReadDraft:
    """Read what drafts, once the backbone is in memory: its model and tokenizer, how many
    parameters it has, its device. Raises ModelError for a draft model that is not smaller and for a
    drafter of another backbone, and as a load does."""
    made = list[ReadDraft]()
    for name, draft in zip(request.drafts, drafts, strict=True):
        if isinstance(draft, DrafterFile):
            made.append(_read_file(name, draft, model, tokenizer, backbone))
        else:
            made.append(_read_model(request, draft, backbone, parameters, plan))
    return made[0] if len(made) == 1 else ReadDraft.of_both(*made)


# kind of file -> what reads its modules, and what drafts with them
READERS: dict[type[DrafterFile], tuple[Callable[..., Any], Callable[..., Any]]] = {
    EagleFile: (read_eagle, Eagle),
    DFlashFile: (read_dflash, DFlash),
    HydraFile: (read_hydra, PathHeads),
    MlpFile: (read_mlp, PathHeads),
}


def _read_file(
    name: str, draft: DrafterFile, model: Any, tokenizer: Any, backbone: Backbone
) -> ReadDraft:
    """A drafter that was trained on the backbone, read as agrees with it best."""
    is_cpu = backbone.device.type == "cpu"
    dtype = torch.float32 if is_cpu else backbone.dtype
    config, vocabulary = backbone.config, backbone.vocabulary
    sizes = Sizes(int(config.hidden_size), int(config.num_hidden_layers), vocabulary)
    lent = Lent(model.get_input_embeddings(), backbone.lm_head, config)
    read, drafter_of = READERS[type(draft)]
    made = read(draft, lent, sizes, backbone.device, dtype)
    count = sum(parameter.numel() for parameter in made.parameters())
    library = native_build.library() if is_cpu else None
    if library is not None:
        pack(made, NativeLibrary(library, native_threads(made)))
    reading = best_reading(made, backbone, tokenizer(TEXT)["input_ids"])
    drafter = drafter_of(made, backbone.context, vocabulary)
    held = held_bytes(made) + drafter.nbytes
    note = f"{name} is {draft.noun} and {reading.words}"
    return ReadDraft((name,), drafter, count, held, (note,))


def _read_model(
    request: LoadRequest, draft: Checkpoint, backbone: Backbone, parameters: int, plan: DevicePlan
) -> ReadDraft:
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
    by_torch = backend.by_pass if isinstance(backend, CudaGraphStep) else backend
    assert isinstance(by_torch, TorchStep)
    drafter = DraftModel(by_torch, backbone.vocabulary)
    held = held_bytes(model, *by_torch.backbone.beside) + by_torch.backbone.cache.nbytes
    note = (
        f"{draft.name} drafts, {number(count)} parameters in {own.precision}: each of its passes "
        f"runs by {by_torch.name}"
    )
    return ReadDraft((draft.name,), drafter, count, held, (note,))
