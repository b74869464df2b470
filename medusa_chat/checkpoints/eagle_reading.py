"""EagleReading: what an EAGLE drafter's file leaves open, decided by trying it on the backbone.

Which layers' states it reads, and whether the fed-back state is normed, is written in several ways,
and read wrongly it costs speed and gives no error. So each reading drafts along a text, and the
one that agrees most often with the backbone's own next tokens is kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.drafters.eagle_model import EagleForm, EagleModel

TEXT = """The water cycle moves water between the sea, the air and the land. The sun heats the sea,
and some of the water becomes vapour, which rises with the warm air. High up it is cold, so the
vapour turns into small drops, and the drops make clouds. When they are heavy enough, rain falls.

def mean(values):
    if not values:
        raise ValueError("mean of an empty list")
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

Question: How many legs do three spiders have?
Answer: A spider has eight legs, so three spiders have 3 * 8 = 24 legs.
"""
MOST = 192  # tokens of it that are read
CLEARLY = 0.05  # of the tokens: how much better another reading must be than the file's own
USELESS = 0.05


@dataclass(frozen=True)
class EagleReading:
    """A form, and how often the drafter's best token was the backbone's: of the next token, and of
    the one after it, by the fed-back state."""

    form: EagleForm
    first: float
    second: float

    @property
    def score(self) -> float:
        return self.first + self.second

    @property
    def words(self) -> str:
        """What was seen, for the load's notes."""
        read = (
            f"layers {', '.join(map(str, self.form.taps))}" if self.form.taps else "the last state"
        )
        seen = f"reads {read}: its best token was the backbone's in {self.first:.0%} of a text"
        if self.first < USELESS:
            return f"{seen}, so it does not fit this model: its drafts will not pay"
        return f"{seen}, the one after it in {self.second:.0%}"


def readings(form: EagleForm, layers: int) -> Iterator[EagleForm]:
    """The file's own form first, then the others that it might mean."""
    for moved in (0, 1, -1) if form.taps else (0,):
        taps = tuple(tap + moved for tap in form.taps)
        if all(0 < tap < layers for tap in taps):
            for is_normed in (form.feeds_norm, not form.feeds_norm) if form.taps else (False,):
                yield replace(form, taps=taps, feeds_norm=is_normed)


@torch.inference_mode()
def best_reading(model: EagleModel, backbone: Backbone, tokens: Sequence[int]) -> EagleReading:
    """Try all readings along `tokens`, and leave the model with the best; the file's own unless
    another is clearly better. The backbone's cache is empty afterwards."""
    layers = int(backbone.config.num_hidden_layers)
    forms = list(readings(model.form, layers))
    places = sorted({tap for form in forms for tap in form.taps})
    final, taps, best = _states(backbone, tokens[:MOST], places)
    found = []
    for form in forms:
        model.form = form
        kept = None if taps is None else taps[:, [places.index(tap) for tap in form.taps]]
        found.append(_tried(model, final, kept, tokens[:MOST], best))
    own = found[0]
    chosen = max(found, key=lambda one: one.score)
    chosen = chosen if chosen.score > own.score + CLEARLY else own
    model.form = chosen.form
    return chosen


def _states(
    backbone: Backbone, tokens: Sequence[int], places: Sequence[int]
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The backbone's states [m, d] and taps [m, k, d] along tokens, and its next token after each,
    int64 [m]."""
    backbone.cache.crop(0)
    if places:
        backbone.tap(places)
    given = torch.tensor(tokens, device=backbone.device)
    final, taps, best = [], [], []
    for part in given.split(backbone.chunk):
        hidden = backbone.run_chunk(part)
        final.append(hidden)
        if places:
            taps.append(backbone.tapped[: len(part)])
        best.append(backbone.lm_head(hidden).argmax(-1))
    backbone.cache.crop(0)
    return torch.cat(final), torch.cat(taps) if places else None, torch.cat(best)


def _tried(
    model: EagleModel, final: Tensor, taps: Tensor | None, tokens: Sequence[int], best: Tensor
) -> EagleReading:
    """Row i has the state at token i and token i + 1: its best token should be what the backbone
    has after token i + 1, and that of the row fed back what it has after the next one."""
    count = len(tokens) - 1
    given = torch.tensor(tokens, device=model.device)
    places, cache = torch.arange(count, device=model.device), model.cache(len(tokens))
    out, scores = model(model.fused(final, taps)[:-1], given[1:], places, None, cache)
    first = _agreement(model, scores, best[1:])
    _, scores = model(out[:-1], given[2:], places[1:], None, cache)
    return EagleReading(model.form, first, _agreement(model, scores, best[2:]))


def _agreement(model: EagleModel, scores: Tensor, best: Tensor) -> float:
    drafted = scores.argmax(-1)
    drafted = drafted if model.ids is None else model.ids[drafted]
    return float((drafted == best.to(drafted.device)).float().mean())
