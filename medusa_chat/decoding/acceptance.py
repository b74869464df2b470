"""Acceptance: which nodes of a draft the backbone agrees to, and its own token after them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from medusa_chat.decoding.draft import Draft
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

    @cached_property
    def scores(self) -> Tensor:
        """The logits by the temperature, float32 [n, V]."""
        logits = self.logits.float()
        return logits if self.settings.is_greedy else logits / self.settings.scale


@dataclass(frozen=True)
class Details:
    """Per node, float32 [n]: see DraftRecord. log_probabilities: at its parent; of the root none.
    thresholds: None unless typical."""

    log_probabilities: Tensor
    entropies: Tensor
    thresholds: Tensor | None = None


@dataclass(frozen=True)
class Acceptance:
    """node int64 [1]: the last accepted one; sampled int64 [n]: the backbone's own token after each
    node; checks [n]: not finite at a node where its logits are broken. All on the device."""

    node: Tensor
    sampled: Tensor
    checks: Tensor
    details: Details | None


Rule = Callable[[VerifyInput], Acceptance]


def exact(given: VerifyInput) -> Acceptance:
    """Take the backbone's own sample at each node and follow the child that equals it.

    Every token is the backbone's own, so this is lossless at any temperature for any deterministic
    tree; greedy is its limit.
    """
    draft, sampled = given.draft, own_tokens(given)
    details = Details(*figures(given)) if given.details else None
    node = draft.tensors.parents  # of plain decoding: there is nothing to accept but the root
    if node.shape[0] > 1:
        lengths = _lengths(draft.tokens == sampled.index_select(0, node), draft)
        node = lengths.argmax(0, keepdim=True)  # the lowest node of equals
    return _result(given, node, sampled, details)


def typical(given: VerifyInput, is_sampled: bool = False) -> Acceptance:
    """Accept a node while p > min(epsilon, delta * exp(-H)) at its parent (Medusa, section 2.3.1).

    The first token and every next token are greedy, so the result is deterministic and
    temperature only relaxes acceptance. Lossy. At temperature 0 it is greedy decoding.
    """
    draft = given.draft
    if given.settings.is_greedy:
        return exact(given)
    at_parent, entropy = figures(given)
    threshold = thresholds(entropy, given.settings)
    accepted = at_parent.exp() > threshold.index_select(0, draft.tensors.parents)
    lengths = _lengths(accepted, draft)
    value = at_parent.expand(len(lengths), -1).masked_fill(draft.tensors.others, 0).sum(1)
    node = torch.where(lengths == lengths.max(), value, -torch.inf).argmax(0, keepdim=True)
    if is_sampled:
        log_p = torch.log_softmax(given.scores, -1)
        chosen = _drawn(log_p.masked_fill(log_p.exp() <= threshold.unsqueeze(1), -torch.inf), given)
    else:
        chosen = given.rows.largest(given.logits)
    details = Details(at_parent, entropy, threshold) if given.details else None
    return _result(given, node, chosen, details)


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
    return _drawn(filtered(given.scores, given.settings), given)


def _drawn(scores: Tensor, given: VerifyInput) -> Tensor:
    """A sample of each row of scores [n, V], int64 [n]: the largest, with the Gumbel noise of the
    node's depth added."""
    tensors, seed = given.draft.tensors, given.settings.seed
    assert seed is not None, "a sampling run needs its seed resolved"
    place, deepest = given.position + 1, given.draft.tree.depth
    return given.rows.draw(scores, tensors.depths, deepest, place, seed)


def figures(given: VerifyInput) -> tuple[Tensor, Tensor]:
    """float32 [n] each: a node's log-probability after its parent (any number for the root), and
    the entropy in nats of the distribution after the node."""
    parents, (sums, entropy) = given.draft.tensors.parents, given.rows.sums(given.scores)
    if parents.shape[0] == 1:
        return sums, entropy
    return given.scores[parents, given.draft.tokens] - sums.index_select(0, parents), entropy


def thresholds(entropy: Tensor, settings: GenerationSettings) -> Tensor:
    """min(epsilon, delta * exp(-H)) of entropies float32 [n] in nats -> [n]: posterior_threshold is
    epsilon, posterior_alpha delta."""
    return torch.clamp(
        settings.posterior_alpha * torch.exp(-entropy), max=settings.posterior_threshold
    )


def _lengths(accepted: Tensor, draft: Draft) -> Tensor:
    """bool [n] -> the number of nodes after the root on the path to each, int64 [n]; -1 where one
    of them was refused."""
    tensors = draft.tensors
    return torch.where((accepted | tensors.others).all(1), tensors.depths, -1)


def _result(
    given: VerifyInput, node: Tensor, sampled: Tensor, details: Details | None
) -> Acceptance:
    if details is not None:
        return Acceptance(node, sampled, details.entropies, details)
    own = given.logits.gather(1, sampled.unsqueeze(1)).view(-1)
    return Acceptance(node, sampled, own, None)
