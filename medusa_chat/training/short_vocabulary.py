"""The shortlist, the tokens that heads may draft, and the heads' loss over it alone."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.training.lora import is_tied
from medusa_chat.training.loss import IGNORED
from medusa_chat.training.recipe import Recipe
from medusa_chat.training.setup import TrainingSetup

SHARE = 0.98  # of the answers' tokens that are in the list
STRIDE = 256  # the list's length is a multiple of this
EACH = 16  # tokens of answers that are needed for each token of the list


def shortlist(answers: Iterable[Sequence[int]], vocabulary: int) -> tuple[int, ...]:
    """Token ids in rising order: the fewest that make up SHARE of the answers, rounded up to a
    multiple of STRIDE with the next frequent ones. Empty where the list would save little, above
    half of the vocabulary, and where the answers are too few to tell."""
    counts: Counter[int] = Counter()
    for ids in answers:
        counts.update(ids)
    total, seen, needed = counts.total(), 0, 0
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    for token in ranked:
        if seen >= SHARE * total:
            break
        seen, needed = seen + counts[token], needed + 1
    length = min(-(-needed // STRIDE) * STRIDE, len(ranked))
    if not needed or 2 * length > vocabulary or total < EACH * length:
        return ()
    return tuple(sorted(ranked[:length]))


@dataclass(frozen=True)
class ShortVocabulary:
    """lm_head: hidden [n, d] -> logits [n, S] of the S tokens of the list. places int64 [V]: the
    column of each token, IGNORED for a token outside.

    A product with 49,152 rows of an LM head is most of a step of the heads' training; what is not
    in the list is never drafted, so that nothing is lost by not learning it.
    """

    lm_head: LogitHead
    places: Tensor

    @classmethod
    def of(cls, tokens: Sequence[int], lm_head: LogitHead) -> "ShortVocabulary | None":
        """The list as a vocabulary; None for an empty one, and for an LM head whose rows cannot be
        taken (in 4 or 8 bits)."""
        chosen = torch.tensor(tokens, dtype=torch.long)
        short = lm_head.rows(chosen) if tokens else None
        if short is None:
            return None
        weight: Tensor = lm_head.linear.weight
        places = torch.full((weight.shape[0],), IGNORED, device=weight.device)
        places[chosen] = torch.arange(len(tokens), device=weight.device)
        return cls(short, places)

    def columns(self, tokens: Tensor) -> Tensor:
        """tokens int64, IGNORED among them -> columns int64 of the same shape, IGNORED for those
        outside of the list."""
        found = self.places[tokens.clamp(min=0)]
        return found.masked_fill(tokens == IGNORED, IGNORED)


def learnt_vocabulary(
    setup: TrainingSetup, recipe: Recipe, tokens: Sequence[int]
) -> ShortVocabulary | None:
    """The vocabulary of the heads' loss, from the shortlist `tokens`; None: all tokens, also where
    the LM head that the heads share is trained too. Tells it in the setup's notes."""
    is_frozen = recipe.method == "medusa-1" or is_tied(setup.model)
    if recipe.own_lm_head or not is_frozen:
        return None
    short = ShortVocabulary.of(tokens, setup.lm_head)
    if short is not None:
        note = f"the heads learn the {len(tokens):,} tokens that make up 98 % of the answers"
        setup.notes.append(f"{note}, of {setup.vocabulary:,}: they draft no others")
    return short
