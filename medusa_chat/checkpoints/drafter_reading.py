"""Reading: what a drafter's file leaves open, decided by trying it on the backbone.

Which layers' states it reads, what is fed back, which rows of a block see each other: each is
written in several ways, and read wrongly it costs speed and gives no error. So each reading drafts
along a text, and the one that agrees most often with the backbone's own next tokens is kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.drafters.dflash_model import DFlashForm, DFlashModel
from medusa_chat.decoding.drafters.eagle_model import EagleForm, EagleModel
from medusa_chat.decoding.drafters.hydra_model import HydraModel
from medusa_chat.decoding.drafters.mlp_speculator import SpeculatorModel

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
CLEARLY = 0.05  # of the places: how much better another reading must be than the file's own
FEW = 3  # places: and at least by so many, which chance gives
USELESS = 0.05
ANCHORS = 24  # places of the text from which a block is drafted


class Along(NamedTuple):
    """The backbone along a text: its m tokens int64 [m], states [m, d], taps [m, k, d], and its
    next token after each, int64 [m]. places: which taps."""

    tokens: Tensor
    final: Tensor
    taps: Tensor | None
    best: Tensor
    places: Sequence[int]

    def kept(self, taps: Sequence[int]) -> Tensor | None:
        """Some of the taps, in this order."""
        if self.taps is None:
            return None
        return self.taps[:, [self.places.index(tap) for tap in taps]]


@dataclass(frozen=True)
class Reading:
    """A form, and in how many of the places that were tried the drafter's best token was the
    backbone's: for the next token, and for the one after it, None where that was not tried."""

    form: Any
    first: float
    second: float | None
    tried: int

    def gain(self, other: "Reading") -> float:
        """By how much it agrees more often than another: for the next token alone where one of
        them was tried no further."""
        gained = self.first - other.first
        if self.second is None or other.second is None:
            return gained
        return gained + self.second - other.second

    @property
    def words(self) -> str:
        """What was seen, for the load's notes."""
        taps = getattr(self.form, "taps", ())
        read = f"layers {', '.join(map(str, taps))}" if taps else "the last state"
        seen = f"reads {read}: its best token was the backbone's in {self.first:.0%} of a text"
        if self.first < USELESS:
            return f"{seen}, so it does not fit this model: its drafts will not pay"
        return seen if self.second is None else f"{seen}, the one after it in {self.second:.0%}"


@torch.inference_mode()
def best_reading(model: Any, backbone: Backbone, tokens: Sequence[int]) -> Reading:
    """Try all readings of a drafter's modules along `tokens`, and leave them with the best; the
    file's own unless another is clearly better. The backbone's cache is empty afterwards."""
    readings, tried = TRIALS[type(model)]
    forms = list(readings(model.form, int(backbone.config.num_hidden_layers)))
    taps = {tap for form in forms for tap in getattr(form, "taps", ())}
    along = _along(backbone, tokens[:MOST], sorted(taps))
    found = []
    for form in forms:
        model.form = form
        found.append(tried(model, along))
    chosen = clearly_best(found)
    model.form = chosen.form
    return chosen


def clearly_best(found: Sequence[Reading]) -> Reading:
    """The best of some readings; the first, the file's own, unless that is clearly better."""
    own, best = found[0], max(found, key=lambda one: one.gain(found[0]))
    return best if best.gain(own) > max(CLEARLY, FEW / own.tried) else own


def _along(backbone: Backbone, tokens: Sequence[int], places: Sequence[int]) -> Along:
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
    all_taps = torch.cat(taps) if places else None
    return Along(given, torch.cat(final), all_taps, torch.cat(best), places)


def _moved(taps: tuple[int, ...], layers: int) -> Iterator[tuple[int, ...]]:
    """The taps as they stand, then one layer further and one before, where the backbone has
    them."""
    for by in (0, 1, -1):
        moved = tuple(tap + by for tap in taps)
        if all(0 < tap < layers for tap in moved):
            yield moved


def eagle_forms(form: EagleForm, layers: int) -> Iterator[EagleForm]:
    """The file's own form first, then the others that it might mean."""
    for taps in _moved(form.taps, layers):
        for is_normed in (form.feeds_norm, not form.feeds_norm) if form.taps else (False,):
            yield replace(form, taps=taps, feeds_norm=is_normed)
        if not form.taps:
            return


def _eagle_tried(model: EagleModel, along: Along) -> Reading:
    """Row i has the state at token i and token i + 1: its best token should be what the backbone
    has after token i + 1, and that of the row fed back what it has after the next one."""
    count = len(along.tokens) - 1
    given = along.tokens.to(model.device)
    places, cache = torch.arange(count, device=model.device), model.cache(count + 1)
    states = model.fused(along.final, along.kept(model.form.taps))
    out, scores = model(states[:-1], given[1:], places, None, cache)
    first = _agreement(model, scores, along.best[1:])
    _, scores = model(out[:-1], given[2:], places[1:], None, cache)
    return Reading(model.form, first, _agreement(model, scores, along.best[2:]), count)


def dflash_forms(form: DFlashForm, layers: int) -> Iterator[DFlashForm]:
    """See eagle_forms."""
    for taps in _moved(form.taps, layers):
        for turned in (form, form.turned_around()):
            for reads_root in (form.reads_root, not form.reads_root):
                yield replace(turned, taps=taps, reads_root=reads_root)


def _dflash_tried(model: DFlashModel, along: Along) -> Reading:
    """A block behind each of some places of the text, all in one pass: its first token should be
    what the backbone has there, and its second what it has next where the first is the text's;
    both are counted in all places."""
    form, device, count = model.form, model.device, len(along.tokens)
    taps = along.kept(form.taps)
    assert taps is not None
    cache = model.cache(count + ANCHORS * form.block)
    model.read(taps, cache)
    step = max(1, (count - 2) // ANCHORS)
    roots = torch.arange(1, count - 1, step, device=device)[:ANCHORS]  # text is before them
    tokens = torch.full((len(roots), form.block), form.mask, device=device)
    tokens[:, 0] = along.tokens.to(device)[roots]
    places = roots[:, None] + torch.arange(form.block, device=device)
    rows = model.filled(tokens.flatten(), places.flatten(), _apart(model, roots, count), cache)
    rows = rows.view(len(roots), form.block, -1)[:, form.block - form.deepest :]
    best = along.best.to(device)
    scores, wanted = model.scores(rows[:, 0]), best[roots]
    if model.markov is not None:
        scores = scores + model.markov(tokens[:, 0])
    first = _agreement(model, scores, wanted)
    right = (along.tokens.to(device)[roots + 1] == wanted).nonzero().flatten()
    if form.deepest < 2 or not len(right):
        return Reading(form, first, None, len(roots))
    scores = model.scores(rows[right, 1])
    if model.markov is not None:
        scores = scores + model.markov(wanted[right])
    second = _agreement(model, scores, best[roots[right] + 1]) * len(right) / len(roots)
    return Reading(form, first, second, len(roots))


def _one_form(form: object, layers: int) -> Iterator[object]:
    """Of a file that leaves nothing open."""
    yield form


def _heads_tried(model: HydraModel | SpeculatorModel, along: Along) -> Reading:
    """See _eagle_tried."""
    given, count = along.tokens.to(model.device), len(along.tokens)
    states = model.read(along.final, model.cache(count))
    states, scores = model.step(0, states[:-1], given[1:])
    first = _agreement(model, scores, along.best[1:])
    if model.deepest < 2:
        return Reading(model.form, first, None, count - 1)
    _, scores = model.step(1, states[:-1], given[2:])
    return Reading(model.form, first, _agreement(model, scores, along.best[2:]), count - 1)


def _apart(model: DFlashModel, roots: Tensor, count: int) -> list[Tensor]:
    """The masks of blocks behind roots int64 [a], each of which sees the text before its root and
    itself: of each layer [a * block, count + a * block]."""
    form, found = model.form, []
    own = torch.arange(form.block, device=model.device)
    each = [model.masks(int(root) + own, int(root)) for root in roots]
    for layer in range(len(model.layers)):
        size = len(roots) * form.block
        mask = torch.full((size, count + size), -torch.inf, dtype=model.dtype, device=model.device)
        for number, root in enumerate(roots.tolist()):
            rows = slice(number * form.block, (number + 1) * form.block)
            mask[rows, :root] = each[number][layer][:, :root]
            columns = slice(count + rows.start, count + rows.stop)
            mask[rows, columns] = each[number][layer][:, root:]
        found.append(mask)
    return found


def _agreement(model: Any, scores: Tensor, best: Tensor) -> float:
    """How often the best of scores [n, V_d] is the backbone's token, int64 [n]."""
    drafted = scores.argmax(-1)
    drafted = drafted if model.ids is None else model.ids[drafted]
    return float((drafted == best.to(drafted.device)).float().mean())


Readings = Callable[[Any, int], Iterator[Any]]
TRIALS: dict[type, tuple[Readings, Callable[[Any, Along], Reading]]] = {
    EagleModel: (eagle_forms, _eagle_tried),
    DFlashModel: (dflash_forms, _dflash_tried),
    HydraModel: (_one_form, _heads_tried),
    SpeculatorModel: (_one_form, _heads_tried),
}
