"""Probe: logits at one position of a text, while the cache holds another text."""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import UsageError


@torch.inference_mode()
def probe_logits(
    backbone: Backbone,
    heads: MedusaHeads | None,
    held: Sequence[int],
    token_ids: Sequence[int],
    path: Sequence[int],
    head: int,
) -> tuple[Tensor, Tensor | None]:
    """Logits [V] of the backbone after `token_ids` and `path`, and of head `head` (from 1; 0: None)
    after `token_ids`, in the dtype of the LM head; see Engine.peek. The head's root is the path's
    first token, or the backbone's most probable one if the path is empty. held: the ids in the
    cache, whose length afterwards says how many of them it still holds."""
    whole = [*token_ids, *path]
    _require(backbone, heads, token_ids, whole, head)
    cache, count = backbone.cache, len(held)
    start = min(common_prefix(held, whole), len(token_ids) - 1)
    end = min(len(whole), count)
    if end - start > backbone.chunk:  # copying them costs more than computing them again
        count = start
        cache.crop(start)
    kept = cache.rows(start, min(end, count))
    try:
        cache.crop(start)
        rest = torch.tensor(whole[start:], device=backbone.device)
        hidden = torch.cat([backbone.run_chunk(chunk) for chunk in rest.split(backbone.chunk)])
    finally:
        cache.put_back(start, kept, count)
    logits = backbone.lm_head(hidden[-1:])[0]
    if not head or heads is None:
        return logits, None
    at = hidden[len(token_ids) - 1 - start].unsqueeze(0)
    root = torch.tensor(path[:1], device=backbone.device) if path else logits.argmax().view(1)
    drafted, names = heads.draft_logits(at, root, backbone.lm_head, head, 1)
    own = drafted[-1]
    if names is not None:  # tokens outside the shortlist are never drafted
        own = own.new_full(logits.shape, -torch.inf).index_copy(0, names, own)
    return logits, own


def _require(
    backbone: Backbone,
    heads: MedusaHeads | None,
    token_ids: Sequence[int],
    whole: Sequence[int],
    head: int,
) -> None:
    if not token_ids or len(whole) > backbone.context:
        raise UsageError(
            f"the text has {len(whole)} tokens and the context {backbone.context}: raise "
            "--max-context where the model allows it"
        )
    if min(whole) < 0 or max(whole) >= backbone.vocabulary:
        raise UsageError(
            "the text has tokens outside the loaded model's vocabulary: load the one that wrote it"
        )
    known = len(heads) if heads else 0
    if not 0 <= head <= known:
        raise UsageError(f"the loaded model has no Medusa head {head}: it has {known}")


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids both begin with."""
    if list(b[: len(a)]) == a:  # a conversation that continues; faster than token by token
        return len(a)
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
