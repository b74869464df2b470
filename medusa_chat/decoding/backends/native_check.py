"""NativeCheck: how far the pass in C is from torch's, on a made-up text."""

import warnings
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.parity import largest, share
from medusa_chat.decoding.fused_layers import FusedDecoder
from medusa_chat.decoding.kv_cache import KVCache, Shape

# of the difference from PyTorch in fp32, as a share of the largest state. Whole numbers multiply
# values of 16 bits, so that a last bit of fp32 can become some 1e-4; in bf16 PyTorch itself is off
# by 0.22 where keys are large (Qwen2), and C by as much
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.4}
# the same of a mixture, layer by layer: up to 0.008 in bf16 for random ones (a wrong pass: 0.07)
LAYERWISE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
PARTS = [13, 1, 1, 1, 8]  # rows of the passes that are compared


@torch.inference_mode()
def difference(backbone: Backbone, twin: FusedDecoder, native: Any) -> float:
    """The largest difference of C's states from those of the torch twin in fp32, with the same
    weights, as a share of the largest state. In 16 bits the twin itself is far off where keys are
    large (Qwen2). Leaves the backbone with C's decoder and an empty cache."""
    ids = torch.arange(sum(PARTS)) * 7 % backbone.vocabulary
    backbone.decoder = native
    is_mixture = _is_mixture(twin)
    native.tap(range(native.structure.count) if is_mixture else ())
    backbone.cache.crop(0)
    states, tapped = [], []
    for part in ids.split(PARTS):
        states.append(backbone.run_chunk(part))
        tapped.append(native.tapped[: len(part)])  # a lone row may run twice
    native.tap(())
    backbone.cache.crop(0)
    reference = Reference(backbone, twin, ids)
    if not is_mixture:
        return share(torch.cat(states), reference.states(reference.embedded))
    return _difference_by_layer(reference, torch.cat(states), torch.cat(tapped))


def limits_of(twin: FusedDecoder) -> dict[torch.dtype, float]:
    """How large the difference may be, by the dtype of the backbone."""
    return LAYERWISE if _is_mixture(twin) else TOLERANCES


def _is_mixture(twin: FusedDecoder) -> bool:
    layers: Any = twin.stock.layers
    return any(layer.mixture is not None for layer in layers)


def _difference_by_layer(reference: "Reference", states: Tensor, tapped: Tensor) -> float:
    """The same of a mixture, where a near tie of two experts may send a row another way, and change
    all that comes behind it: layer by layer, each from C's own states before it, and of the rows of
    a kind of pass the median one. states [n, d]; tapped [n, L, d]: behind each layer."""
    count = tapped.shape[1]
    found = [(reference.normed(tapped[:, -1]), states)]
    for number in range(count):
        before = tapped[:, number - 1] if number else reference.embedded
        found.append((reference.states(before, number), tapped[:, number]))
    return largest(_typical(ours, expected) for expected, ours in found)


def _typical(ours: Tensor, expected: Tensor) -> float:
    """The largest difference of the median row [n, d] of a kind of pass, as a share of the largest
    number expected."""
    off = (ours - expected).abs().amax(-1) / (float(expected.abs().max()) or 1.0)
    passes = off.split(PARTS)
    lone = torch.cat([rows for rows in passes if len(rows) == 1])
    kinds = [lone, *(rows for rows in passes if len(rows) > 1)]
    return largest(float(rows.median()) for rows in kinds)


class Reference:
    """Causal passes of torch over ids int64 [n], in fp32 from embeddings [n, d] on, whatever the
    weights are stored in."""

    def __init__(self, backbone: Backbone, twin: FusedDecoder, ids: Tensor) -> None:
        self._twin, self._ids, self._backbone = twin, ids, backbone
        self._places = torch.arange(len(ids))
        self.embedded: Tensor = twin.embedded(ids[None])[0]

    def states(self, before: Tensor, number: int | None = None) -> Tensor:
        """before float32 [n, d] -> the states behind all layers and the last norm, or behind the
        layer of this number alone, float32 [n, d]."""
        backbone, twin = self._backbone, self._twin
        own = backbone.cache.layers.layers
        shapes = [Shape(t.shape[1], t.shape[3], t.device) for x in own for t in (x.keys, x.values)]
        cache = KVCache(shapes, len(self._ids), torch.float32)
        masks = {w: backbone.causal_mask(self._places, w).float() for w in backbone.windows}
        twin.tap(() if number is None else (number,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: a norm's weight has another dtype
            hidden = before[None]
            inputs = twin.own_inputs(self._ids[None], hidden)
            kinds = backbone.by_kind(masks)
            out = twin.run(hidden, self._places[None], cache.layers, kinds, inputs, number)
        states: Tensor = out.last_hidden_state[0] if number is None else twin.tapped[:, 0]
        twin.tap(())
        return states

    def normed(self, hidden: Tensor) -> Tensor:
        """[n, d] -> its last norm."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: Tensor = self._twin.stock.norm(hidden)
        return found
