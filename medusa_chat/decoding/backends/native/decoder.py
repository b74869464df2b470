"""NativeDecoder: a decoder of merged layers, the norm after them included, as one call."""

from collections.abc import Sequence
from ctypes import addressof, c_int64
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.backends.native import structs
from medusa_chat.decoding.backends.native.library import NativeThreads, Passes
from medusa_chat.decoding.backends.native.texts import NativeTexts
from medusa_chat.decoding.fused_layers import FusedDecoder
from medusa_chat.decoding.kv_cache import Layer
from medusa_chat.decoding.settings import MAX_NODES


@dataclass(frozen=True)
class Output:
    """last_hidden_state [1, n, d] after the final norm, as transformers calls it."""

    last_hidden_state: Tensor


class NativeDecoder(nn.Module):
    """A decoder of merged layers with native linears as one call; its states are in fp32, the
    cache in the weights' dtype. It is called like FusedDecoder, and calls it for other caches."""

    def __init__(self, twin: FusedDecoder, layers: list[Layer], threads: NativeThreads) -> None:
        super().__init__()
        self._twin, self._threads = twin, threads
        stock = twin.stock
        capacity = layers[0].get_max_length()
        first = stock.layers[0]
        places = torch.arange(capacity)[None]
        embedding = stock.embed_tokens.weight
        cosines, sines = stock.rotary_emb(embedding[:1, None].float(), position_ids=places)
        self._kept = [t[0].contiguous() for t in (cosines, sines)]
        norm, table = self._floats(stock.norm.weight), embedding.data_ptr()
        self._layers = (structs.Layer * len(layers))()
        for layer, kv, out in zip(stock.layers, layers, self._layers, strict=True):
            self._fill(layer, kv, out)
        heads, kv_heads = first.heads
        self._decoder = structs.Decoder(
            *(len(layers), embedding.shape[1], heads, kv_heads, first.head_dim),
            *(first.down.ins, capacity, len(embedding), embedding.dtype == torch.bfloat16),
            *(first.before.epsilon, first.scaling),
            *(table, norm),
            *(t.data_ptr() for t in self._kept[:2]),
            self._layers,
        )
        self._passes = Passes(self._decoder, threads)
        self._places = (c_int64 * MAX_NODES)()  # of the rows of a step

    def _fill(self, layer: Any, kv: Layer, out: structs.Layer) -> None:
        """Fill in the addresses of what this layer reads."""
        assert kv.keys is not None and kv.values is not None
        out.before, out.after = map(self._floats, (layer.before.weight, layer.after.weight))
        for name in ("qkv", "out", "gate_up", "down"):
            linear = getattr(layer, name)
            setattr(out, name, linear.weights)
            setattr(out, f"{name}_bias", linear.bias_at)
        out.keys, out.values = kv.keys.data_ptr(), kv.values.data_ptr()

    def _floats(self, weight: Tensor) -> int:
        """The address of a vector [d] in fp32, which this decoder keeps alive."""
        floats = weight.detach().float().contiguous()
        self._kept.append(floats)
        return floats.data_ptr()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: Any,
        attention_mask: Tensor,
        **_: Any,
    ) -> Any:
        """input_ids and position_ids int64 [1, n], attention_mask additive [1, 1, n, s] -> an
        Output of float32 [1, n, d]. The cache is always used."""
        kv = past_key_values.layers[0]
        if type(kv) is not Layer:
            return self._twin(input_ids, position_ids, past_key_values, attention_mask)
        mask = attention_mask[0, 0].float()
        if mask.stride(1) != 1:
            mask = mask.contiguous()
        try:
            places = position_ids[0].contiguous()
            hidden = self._run(input_ids[0], places.data_ptr(), mask, kv.start, 0)
        except IndexError:  # the reference raises the error
            return self._twin(input_ids, position_ids, past_key_values, attention_mask)
        return Output(hidden[None])

    def run_rows(self, tokens: Tensor, depths: Sequence[int], mask: Tensor, start: int) -> Tensor:
        """tokens int64 [n], so deep behind `start` tokens -> float32 [n, d] after the final norm;
        keys and values are written after those tokens, which every row sees. mask additive float32
        [n, n]: of the rows for each other. Raises IndexError for a token or a place out of
        range."""
        self._places[: len(depths)] = [start + depth for depth in depths]
        return self._run(tokens, addressof(self._places), mask, start, start)

    def _run(self, tokens: Tensor, places: int, mask: Tensor, start: int, free: int) -> Tensor:
        """See Passes.run. mask [n, start + n - free]: of the columns from `free` on."""
        job = self._passes.job
        job.mask, job.stride, job.free, job.start = mask.data_ptr(), mask.stride(0), free, start
        return self._passes.run(tokens, places, start + tokens.shape[0])

    def texts(self, slots: int, capacity: int) -> NativeTexts:
        """Room for `slots` texts of up to `capacity` tokens, at most this decoder's."""
        return NativeTexts(self._decoder, slots, capacity, self._threads)

    def text_bytes(self, capacity: int) -> int:
        """Memory of one of them."""
        return NativeTexts.bytes_of(self._decoder, capacity)
