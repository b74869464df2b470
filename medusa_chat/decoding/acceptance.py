"""Acceptance: which nodes of a draft the backbone agrees to, and its own token after them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_chat.decoding.drafters import Draft
from medusa_chat.decoding.sampling import TORCH, Position, Rows, drawn, own_tokens
from medusa_chat.decoding.settings import GenerationSettings


@dataclass(frozen=True)
class Details:
    """Per node, float32 [n] and int64 [n]: see DraftRecord. thresholds: None unless typical."""

    probabilities: Tensor
    entropies: Tensor
    thresholds: Tensor | None
    sampled: Tensor


@dataclass(frozen=True)
class Acceptance:
    """path int64 [depth + 1]: accepted nodes, the root first, padded with the root; length []:
    how many of them count; node [1]: the last one; next_token [1]: the backbone's own token after
    it; is_finite []: whether the numbers it came from were. All on the device."""

    path: Tensor
    length: Tensor
    node: Tensor
    next_token: Tensor
    is_finite: Tensor
    details: Details | None


@dataclass(frozen=True)
class VerifyInput:
    """The input of an acceptance rule. logits: the backbone's [n, V], a row for each node of the
    draft; position: of the root in the text; details: whether Details are wanted; rows: what reads
    the logits."""

    draft: Draft
    logits: Tensor
    position: Position
    settings: GenerationSettings
    details: bool
    rows: Rows = TORCH


Rule = Callable[[VerifyInput], Acceptance]


def exact(verify_input: VerifyInput) -> Acceptance:
    """Take the backbone's own sample at each node and follow the child that equals it.

    Every token is the backbone's own, so this is lossless at any temperature for any deterministic
    tree; greedy is its limit.
    """
    draft, logits, settings = verify_input.draft, verify_input.logits, verify_input.settings
    rows = verify_input.rows
    sampled = own_tokens(logits, draft.tensors, verify_input.position, settings, rows)
    seen = figures(draft, logits, settings.scale, rows) if verify_input.details else None
    found = _details(seen, None, sampled)
    if len(draft.tree) == 1:  # plain decoding: there is nothing to accept but the root
        root, path = draft.tensors.depths, draft.tensors.paths[0]
        is_finite = torch.isfinite(logits.max())
        return Acceptance(path, (root + 1)[0], root, sampled, is_finite, found)
    accepted = draft.tokens == sampled.index_select(0, draft.tensors.parents)
    length = _prefix_lengths(accepted, draft)
    node = _first_best(length)
    return _result(draft, logits, node, length, sampled, found)


def typical(verify_input: VerifyInput) -> Acceptance:
    """Accept a node while p > min(epsilon, delta * exp(-H)) at its parent (Medusa, section 2.3.1).

    The first token and every next token are greedy, so the result is deterministic and
    temperature only relaxes acceptance. Lossy. At temperature 0 it is greedy decoding.
    """
    return _typical(verify_input, is_sampled=False)


def typical_sampled(verify_input: VerifyInput) -> Acceptance:
    """As typical, but the first token and every next token are sampled from the tokens that pass
    the rule, renormalised. Lossy. At temperature 0 it is greedy decoding."""
    return _typical(verify_input, is_sampled=True)


ACCEPTANCE: dict[str, Rule] = {
    "exact": exact,
    "typical": typical,
    "typical-sampled": typical_sampled,
}


def _typical(verify_input: VerifyInput, is_sampled: bool) -> Acceptance:
    draft, logits, settings = verify_input.draft, verify_input.logits, verify_input.settings
    if settings.is_greedy:
        return exact(verify_input)
    rows = verify_input.rows
    seen = at_parent, entropy = figures(draft, logits, settings.scale, rows)
    threshold = thresholds(entropy, settings)
    accepted = at_parent.exp() > threshold.index_select(0, draft.tensors.parents)
    length = _prefix_lengths(accepted, draft)
    value = torch.where(draft.tensors.ancestors, at_parent, 0)[:, 1:].sum(1)
    longest = length == length.max()
    node = _first_best(torch.where(longest, value, -torch.inf))
    if is_sampled:
        log_p = torch.log_softmax(logits.float() / settings.scale, -1)
        passing = log_p.masked_fill(log_p.exp() <= threshold.unsqueeze(1), -torch.inf)
        chosen = drawn(passing, draft.tensors, verify_input.position, settings, rows)
    else:
        chosen = rows.largest(logits)
    found = _details(seen if verify_input.details else None, threshold, chosen)
    return _result(draft, logits, node, length, chosen, found)


def figures(
    draft: Draft, logits: Tensor, temperature: float, rows: Rows = TORCH
) -> tuple[Tensor, Tensor]:
    """float32 [n] each: a node's log-probability after its parent, and the entropy in nats of the
    distribution after the node."""
    scores, parents = logits.float() / temperature, draft.tensors.parents
    sums, entropy = rows.sums(scores)
    return scores[parents, draft.tokens] - sums.index_select(0, parents), entropy


def thresholds(entropy: Tensor, settings: GenerationSettings) -> Tensor:
    """min(epsilon, delta * exp(-H)) of entropies float32 [n] in nats -> [n]: posterior_threshold is
    epsilon, posterior_alpha delta."""
    return torch.clamp(
        settings.posterior_alpha * torch.exp(-entropy), max=settings.posterior_threshold
    )


def _prefix_lengths(accepted: Tensor, draft: Draft) -> Tensor:
    """[n] -> the length of the path from the root to each node, both included; 0 where a node on
    it was refused. The root always counts as accepted."""
    refused = ~accepted
    refused[:1] = False  # a slice is filled on the device; an element is copied from the host
    broken = (draft.tensors.ancestors & refused).any(1)
    return (draft.tensors.depths + 1).masked_fill(broken, 0)


def _first_best(values: Tensor) -> Tensor:
    """Index [1] of the largest value; the lowest node wins a tie."""
    count = len(values)
    order = torch.arange(count, 0, -1, device=values.device)
    return torch.where(values == values.max(), order, 0).argmax().view(1)


def _details(
    seen: tuple[Tensor, Tensor] | None, threshold: Tensor | None, sampled: Tensor
) -> Details | None:
    """Details of a step by its `figures`; None where they were not asked for."""
    if seen is None:
        return None
    at_parent, entropy = seen
    return Details(at_parent.exp(), entropy, threshold, sampled)


def _result(
    draft: Draft,
    logits: Tensor,
    node: Tensor,
    length: Tensor,
    chosen: Tensor,
    details: Details | None,
) -> Acceptance:
    best = logits.index_select(0, node)
    return Acceptance(
        path=draft.tensors.paths.index_select(0, node)[0],
        length=length.index_select(0, node)[0],
        node=node,
        next_token=chosen.index_select(0, node),
        is_finite=torch.isfinite(best.max()),
        details=details,
    )
