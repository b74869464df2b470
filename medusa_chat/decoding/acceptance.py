"""Acceptance: which nodes of a draft the backbone agrees to, and its own token after them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_chat.decoding.drafters import Draft
from medusa_chat.decoding.sampling import entropies, filtered, gumbel
from medusa_chat.decoding.settings import GenerationSettings

Position = int | Tensor  # of the root in the text; a tensor [1] where only the device knows it


class Rows:
    """What a rule reads from rows of scores [n, V] of a floating dtype, by torch's operators.
    A backend may have it faster (backends/native/rows.py); there is no rule in it."""

    def largest(self, scores: Tensor) -> Tensor:
        """scores [n, V] -> the place of each row's largest, int64 [n]; the lowest of equals."""
        return scores.argmax(-1)

    def draw(
        self, scores: Tensor, depths: Tensor, deepest: int, place: Position, seed: int | Tensor
    ) -> Tensor:
        """`largest` of scores [n, V] with the noise (`gumbel`) of each row's depth added: int64
        [n]. depths int64 [n], at most `deepest`; place: of depth 0 in the text."""
        places = place + torch.arange(deepest + 1, device=scores.device)
        noise = gumbel(seed, places, scores.shape[-1])
        return (scores + noise.index_select(0, depths)).argmax(-1)

    def sums(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """log(sum(exp)) of each row, and the entropy in nats of softmax(row): float32 [n] each."""
        log_sums = scores.logsumexp(-1)
        return log_sums, entropies(scores - log_sums.unsqueeze(-1))


TORCH = Rows()


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


Rule = Callable[[VerifyInput], Acceptance]


def exact(given: VerifyInput) -> Acceptance:
    """Take the backbone's own sample at each node and follow the child that equals it.

    Every token is the backbone's own, so this is lossless at any temperature for any deterministic
    tree; greedy is its limit.
    """
    draft, sampled, details = given.draft, own_tokens(given), None
    if given.details:
        at_parent, entropy = figures(given)
        details = Details(at_parent.exp(), entropy, None, sampled)
    if len(draft.tokens) == 1:  # plain decoding: there is nothing to accept but the root
        root, path = draft.tensors.depths, draft.tensors.paths[0]
        is_finite = torch.isfinite(given.logits.max())
        return Acceptance(path, (root + 1)[0], root, sampled, is_finite, details)
    length = _prefix_lengths(draft.tokens == sampled.index_select(0, draft.tensors.parents), draft)
    return _result(given, _first_best(length), length, sampled, details)


def typical(given: VerifyInput, is_sampled: bool = False) -> Acceptance:
    """Accept a node while p > min(epsilon, delta * exp(-H)) at its parent (Medusa, section 2.3.1).

    The first token and every next token are greedy, so the result is deterministic and
    temperature only relaxes acceptance. Lossy. At temperature 0 it is greedy decoding.
    """
    draft, logits, settings = given.draft, given.logits, given.settings
    if settings.is_greedy:
        return exact(given)
    at_parent, entropy = figures(given)
    threshold = thresholds(entropy, settings)
    accepted = at_parent.exp() > threshold.index_select(0, draft.tensors.parents)
    length = _prefix_lengths(accepted, draft)
    value = torch.where(draft.tensors.ancestors, at_parent, 0)[:, 1:].sum(1)
    node = _first_best(torch.where(length == length.max(), value, -torch.inf))
    if is_sampled:
        log_p = torch.log_softmax(logits.float() / settings.scale, -1)
        chosen = _drawn(log_p.masked_fill(log_p.exp() <= threshold.unsqueeze(1), -torch.inf), given)
    else:
        chosen = given.rows.largest(logits)
    details = Details(at_parent.exp(), entropy, threshold, chosen) if given.details else None
    return _result(given, node, length, chosen, details)


def typical_sampled(given: VerifyInput) -> Acceptance:
    """As typical, but the first token and every next token are sampled from the tokens that pass
    the rule, renormalised. Lossy. At temperature 0 it is greedy decoding."""
    return typical(given, is_sampled=True)


ACCEPTANCE: dict[str, Rule] = {
    "exact": exact,
    "typical": typical,
    "typical-sampled": typical_sampled,
}


def own_tokens(given: VerifyInput) -> Tensor:
    """The backbone's own token after each node, int64 [n]: greedy at temperature 0 (the lowest
    index wins a tie), else a sample by Gumbel-max."""
    if given.settings.is_greedy:
        return given.rows.largest(given.logits)
    return _drawn(filtered(given.logits.float() / given.settings.scale, given.settings), given)


def _drawn(scores: Tensor, given: VerifyInput) -> Tensor:
    """A sample of each row of scores [n, V], int64 [n]: the largest, with the Gumbel noise of the
    node's depth added."""
    tensors, seed = given.draft.tensors, given.settings.seed
    assert seed is not None, "a sampling run needs its seed resolved"
    deepest = tensors.paths.shape[1] - 1
    return given.rows.draw(scores, tensors.depths, deepest, given.position + 1, seed)


def figures(given: VerifyInput) -> tuple[Tensor, Tensor]:
    """float32 [n] each: a node's log-probability after its parent, and the entropy in nats of the
    distribution after the node."""
    scores, parents = given.logits.float() / given.settings.scale, given.draft.tensors.parents
    sums, entropy = given.rows.sums(scores)
    return scores[parents, given.draft.tokens] - sums.index_select(0, parents), entropy


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
    order = torch.arange(len(values), 0, -1, device=values.device)
    return torch.where(values == values.max(), order, 0).argmax().view(1)


def _result(
    given: VerifyInput, node: Tensor, length: Tensor, chosen: Tensor, details: Details | None
) -> Acceptance:
    return Acceptance(
        path=given.draft.tensors.paths.index_select(0, node)[0],
        length=length.index_select(0, node)[0],
        node=node,
        next_token=chosen.index_select(0, node),
        is_finite=torch.isfinite(given.logits.index_select(0, node).max()),
        details=details,
    )
