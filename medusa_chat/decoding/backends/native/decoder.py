"""NativeStep, whose pass is one call into C, and NativeDecoder, which makes the call."""

from collections.abc import Sequence
from ctypes import addressof, byref, c_int64, pointer
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.native import structs
from medusa_chat.decoding.backends.native.library import NativeThreads
from medusa_chat.decoding.backends.native.rows import NativeRows
from medusa_chat.decoding.draft import Draft, TreeTensors
from medusa_chat.decoding.fused_layers import FusedDecoder
from medusa_chat.decoding.kv_cache import Layer
from medusa_chat.decoding.settings import MAX_NODES
from medusa_chat.decoding.step import TorchStep


class Passes:
    """Passes through one decoder structure. job: what the next pass reads; the caller fills in how
    its rows see the text (kernels/pass.h). Tensors that it points at must outlive the pass."""

    def __init__(self, decoder: structs.Decoder, threads: NativeThreads) -> None:
        self._decoder, self._threads = decoder, threads
        self.job = structs.Pass(pointer(decoder))
        self._work = torch.empty(0)

    def run(self, tokens: Tensor, places: int, keys: int) -> Tensor:
        """tokens int64 [n], and the address of as many places int64 -> float32 [n, d] after the
        final norm. keys: the most tokens that a row sees. Raises IndexError for a token or a place
        out of range."""
        rows, job = tokens.shape[0], self.job
        job.threads, job.keys = self._threads.count, keys
        self._make_room(rows, keys)
        hidden = torch.empty(rows, self._decoder.hidden)
        tokens = tokens.contiguous()
        job.tokens, job.positions = tokens.data_ptr(), places
        job.rows, job.hidden = rows, hidden.data_ptr()
        if self._threads.c.run(byref(job)):
            raise IndexError("a token id or its position is out of range")
        return hidden

    def _make_room(self, rows: int, keys: int) -> None:
        """Allocate the work space of a pass of `rows` rows over `keys` tokens."""
        keys = -(-keys // 256) * 256
        threads = self._threads
        needed = threads.c.work_size(byref(self._decoder), rows, keys, threads.count)
        if self._work.numel() < needed:
            self._work = torch.empty(needed)
            self.job.work = self._work.data_ptr()


class NativeDecoder(nn.Module):
    """A decoder of merged layers with native linears as one call; its states are in fp32, the
    cache in the weights' dtype. It is called like FusedDecoder."""

    def __init__(self, twin: FusedDecoder, layers: list[Layer], threads: NativeThreads) -> None:
        super().__init__()
        self.threads = threads
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
        self.structure = structs.Decoder(
            len(layers),
            embedding.shape[1],
            heads,
            kv_heads,
            first.head_dim,
            cosines.shape[-1],
            first.down.ins,
            capacity,
            len(embedding),
            embedding.dtype == torch.bfloat16,
            first.before.eps,
            first.scaling,
            table,
            norm,
            *(t.data_ptr() for t in self._kept[:2]),
            self._layers,
        )
        self._passes = Passes(self.structure, threads)
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
        """input_ids and position_ids int64 [1, n], attention_mask additive [1, 1, n, s] ->
        last_hidden_state float32 [1, n, d]. The cache is always used. Raises as `run_rows` does."""
        start, places = past_key_values.layers[0].start, position_ids[0].contiguous()
        mask = attention_mask[0, 0].float().contiguous()
        free = 0 if mask[:, :start].any() else start
        hidden = self._run(input_ids[0], places.data_ptr(), mask[:, free:], start, free)
        return SimpleNamespace(last_hidden_state=hidden[None])

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


class NativeStep(TorchStep):
    """A StepBackend for a backbone whose decoder and LM head are native."""

    def __init__(self, backbone: Backbone, decoder: NativeDecoder, threads: NativeThreads) -> None:
        super().__init__(backbone)
        self.rows: NativeRows = NativeRows(threads)
        count = threads.count
        self.name = f"the pass in C, by {count} thread{'s' if count > 1 else ''}"
        self.decoder, self._window = decoder, backbone.windows[0]
        self._lm_head: Any = backbone.lm_head.linear

    def run(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """The backbone's pass over n nodes -> hidden [n, d] after the final norm, float32, and
        logits [n, V] of that dtype. The text before the tree needs no mask, unless it is longer
        than the attention window."""
        start, depth = self.backbone.cache.length, draft.tree.depth
        if self._window is not None and start + depth >= self._window:
            return super().run(draft)
        hidden = self.decoder.run_rows(
            draft.tokens, draft.tree.depths, _mask_of(draft.tensors), start
        )
        return hidden, self.backbone.lm_head.finish(self._lm_head.product(hidden))


@lru_cache(maxsize=256)
def _mask_of(tensors: TreeTensors) -> Tensor:
    """The additive mask float32 [n, n] of a draft's nodes for each other."""
    ancestors = tensors.ancestors
    return torch.zeros(ancestors.shape).masked_fill_(ancestors.logical_not(), -torch.inf)
