"""NativeStep: a Llama-like decoder of fp32 or bf16 on a CPU as one call into C (kernels/decoder.c).

A step of a small model is a hundred operators, each of which takes torch longer to begin than to
do. One call does them all, and sums every number in one order, so a tree's rows are bit-equal to
plain decoding's. The rules of a step are not here (step.py). Its reference is the decoder of
merged layers (fused_layers.py), which also runs whatever this one does not support.
"""

import math
import warnings
from collections.abc import Sequence
from ctypes import addressof, byref, c_char, c_int64, pointer
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.acceptance import Position, Rows
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends import native_library as structs
from medusa_chat.decoding.backends.native_library import NativeLibrary, Weights
from medusa_chat.decoding.backends.native_weights import (
    DISABLED,
    UNCHANGED,
    WIDEST_PANEL,
    Blocks,
    NativeLinear,
    WeightStorage,
    pack_blocks,
    pack_floats,
)
from medusa_chat.decoding.backends.parity import agrees, share
from medusa_chat.decoding.backends.replacements import is_plain_layer
from medusa_chat.decoding.draft import Draft, TreeTensors
from medusa_chat.decoding.families import native_supports
from medusa_chat.decoding.fused_layers import FusedDecoder
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.kv_cache import KVCache, Layer, Shape
from medusa_chat.decoding.settings import MAX_NODES, GenerationSettings
from medusa_chat.decoding.step import TorchStep

# of the difference from PyTorch in fp32, as a share of the largest state. Whole numbers multiply
# values of 16 bits, so that a last bit of fp32 can become some 1e-4; in bf16 PyTorch itself is off
# by 0.22 where keys are large (Qwen2), and C by as much
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.4}
FEW = 2**16  # numbers that one thread reads as fast as several that wait for each other


class Passes:
    """Passes through one decoder structure. job: what the next pass reads; the caller fills in how
    its rows see the text (kernels/pass.h). Tensors that it points at must outlive the pass."""

    def __init__(self, decoder: structs.Decoder, library: NativeLibrary) -> None:
        self._decoder, self._library = decoder, library
        self.job = structs.Pass(pointer(decoder))
        self._work = torch.empty(0)

    def run(self, tokens: Tensor, places: int, keys: int) -> Tensor:
        """tokens int64 [n], and the address of as many places int64 -> float32 [n, d] after the
        final norm. keys: the most tokens that a row sees. Raises IndexError for a token or a place
        out of range."""
        rows, job = tokens.shape[0], self.job
        job.threads, job.keys = self._library.threads, keys
        self._make_room(rows, keys)
        hidden = torch.empty(rows, self._decoder.hidden)
        tokens = tokens.contiguous()
        job.tokens, job.positions = tokens.data_ptr(), places
        job.rows, job.hidden = rows, hidden.data_ptr()
        if self._library.c.run(byref(job)):
            raise IndexError("a token id or its position is out of range")
        return hidden

    def _make_room(self, rows: int, keys: int) -> None:
        """Allocate the work space of a pass of `rows` rows over `keys` tokens."""
        keys = -(-keys // 256) * 256
        library = self._library
        needed = library.c.work_size(byref(self._decoder), rows, keys, library.threads)
        if self._work.numel() < needed:
            self._work = torch.empty(needed)
            self.job.work = self._work.data_ptr()


class NativeDecoder(nn.Module):
    """A decoder of merged layers with native linears as one call; its states are in fp32, the
    cache in the weights' dtype. It is called like FusedDecoder."""

    def __init__(self, twin: FusedDecoder, layers: list[Layer], library: NativeLibrary) -> None:
        super().__init__()
        self.library = library
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
        self._passes = Passes(self.structure, library)
        self._places = (c_int64 * MAX_NODES)()  # of the rows of a step

    def _fill(self, layer: Any, kv: Layer, out: structs.Layer) -> None:
        """Fill in the addresses of what this layer reads."""
        assert kv.keys is not None and kv.values is not None
        out.before, out.after = map(self._floats, (layer.before.weight, layer.after.weight))
        for name in ("qkv", "out", "gate_up", "down"):
            linear = getattr(layer, name)
            setattr(out, name, linear.weights)
            setattr(out, f"{name}_bias", linear.bias_address)
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


class NativeTexts:
    """Keys and values of `slots` texts of up to `capacity` tokens each, and passes over them.

    A text's row has the bits that it has in a pass alone, whatever texts are beside it. native: the
    decoder of one text, whose weights these passes read.
    """

    def __init__(self, native: NativeDecoder, slots: int, capacity: int) -> None:
        """capacity: at most the decoder's own."""
        decoder = native.structure
        shape = slots, decoder.kv_heads, capacity, decoder.head_dim
        # not zeros: memory is taken where a text writes, not for all that it might
        dtype = torch.bfloat16 if decoder.is_half else torch.float32
        self._kv = torch.empty(2 * decoder.count, *shape, dtype=dtype)
        self._layers = (structs.Layer * decoder.count)(*decoder.layers[: decoder.count])
        for layer, keys, values in zip(self._layers, self._kv[::2], self._kv[1::2], strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        fields = {name: getattr(decoder, name) for name, *_ in decoder._fields_}
        fields |= {"capacity": capacity, "layers": self._layers}
        self._passes = Passes(structs.Decoder(**fields), native.library)

    @staticmethod
    def bytes_of(native: NativeDecoder, capacity: int) -> int:
        """Memory of one text of `capacity` tokens."""
        decoder = native.structure
        numbers = 2 * decoder.count * decoder.kv_heads * capacity * decoder.head_dim
        return int(numbers * (2 if decoder.is_half else 4))

    def put(self, slot: int, cache: KVCache) -> None:
        """Copy the cache's text to a slot. Its keys and values have one shape in all layers."""
        (rows,) = cache.rows(0, cache.length)
        self._kv[:, slot, :, : cache.length] = rows[:, 0]

    def run(self, tokens: Tensor, places: Tensor, slots: Tensor) -> Tensor:
        """tokens, places and slots int64 [n] -> float32 [n, d] after the final norm: of each slot
        the token behind the first `place` ones of its text. No slot may come twice. Raises
        IndexError for a token or a place out of range."""
        job = self._passes.job
        job.texts = slots.data_ptr()
        places = places.contiguous()
        return self._passes.run(tokens, places.data_ptr(), int(places.max()) + 1)


class NativeRows(Rows):
    """Rows in C. Samples are torch's: where rounding might have it otherwise (a near tie, the end
    of top-p), torch draws (test_native_rows.py compares them). Sums are torch's to rounding.

    No operator of torch reads a whole row here: its threads go on spinning after one, on the cores
    that the next pass wants."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library, self._work = library, torch.empty(0)

    def largest(self, scores: Tensor) -> Tensor:
        """Rows.largest: scores [n, V] of any floating dtype -> int64 [n]."""
        return self._drawn(scores, structs.Draw(scale=1.0))[0]

    def sample(
        self,
        logits: Tensor,
        settings: GenerationSettings,
        depths: Tensor,
        deepest: int,
        place: Position,
        seed: int | Tensor,
    ) -> Tensor:
        """Rows.sample: logits [n, V] of any floating dtype, depths int64 [n] -> int64 [n]."""
        if not isinstance(place, int) or not isinstance(seed, int):
            return super().sample(logits, settings, depths, deepest, place, seed)
        lowest = math.log(settings.min_p) if settings.min_p > 0 else -math.inf
        cut = settings.scale, settings.top_p, lowest
        job = structs.Draw(None, depths.data_ptr(), seed=seed, place=place, top_k=settings.top_k)
        job.scale, job.top_p, job.min_p = cut
        tokens, unsure = self._drawn(logits, job)
        for row in unsure:
            one, at = logits[row : row + 1], place + int(depths[row])
            tokens[row] = super().sample(one, settings, depths.new_zeros(1), 0, at, seed)[0]
        return tokens

    def draw(
        self, scores: Tensor, depths: Tensor, deepest: int, place: Position, seed: int | Tensor
    ) -> Tensor:
        """Rows.draw: scores [n, V] of any floating dtype, depths int64 [n] -> int64 [n]."""
        if not isinstance(place, int) or not isinstance(seed, int):
            return super().draw(scores, depths, deepest, place, seed)
        return self.draw_each(scores, place + depths, torch.full_like(depths, seed))

    def draw_each(self, scores: Tensor, places: Tensor, seeds: Tensor) -> Tensor:
        """`draw` of rows of different texts, scores [n, V]: row i by seed i at place i of its text,
        int64 [n] each -> tokens int64 [n]; the largest where the place is under 0."""
        addresses = places.data_ptr(), seeds.data_ptr()
        job = structs.Draw(None, None, *addresses, scale=1.0, top_p=1.0, min_p=-math.inf)
        tokens, unsure = self._drawn(scores, job)
        for row in unsure:
            one, place, seed = scores[row : row + 1], int(places[row]), int(seeds[row])
            tokens[row] = super().draw(one, places.new_zeros(1), 0, place, seed)[0]
        return tokens

    def _drawn(self, scores: Tensor, job: structs.Draw) -> tuple[Tensor, list[int]]:
        """The tokens int64 [n] by a job whose rows are scores [n, V], and of which rows they are
        unsure."""
        scores = scores.float().contiguous()
        rows, size = scores.shape
        threads = self._count(scores)
        needed = threads * self._library.c.draw_work(size)
        if self._work.numel() < needed:
            self._work = torch.empty(needed)
        tokens, unsure = torch.empty(rows, dtype=torch.long), bytearray(rows)
        job.scores, job.work, job.tokens = (t.data_ptr() for t in (scores, self._work, tokens))
        job.unsure = addressof(c_char.from_buffer(unsure))
        job.rows, job.size = rows, size
        self._library.c.draw(byref(job), threads)
        return tokens, [row for row in range(rows) if unsure[row]] if any(unsure) else []

    def sums(self, logits: Tensor, scale: Any = 1.0) -> tuple[Tensor, Tensor]:
        """Rows.sums: logits [n, V] of any floating dtype -> float32 [n] twice."""
        logits = logits.float().contiguous()
        sums, entropies = (torch.empty(logits.shape[0]) for _ in range(2))
        addresses = (t.data_ptr() for t in (logits, sums, entropies))
        job = structs.Sums(*addresses, *logits.shape, scale)
        self._library.c.row_sums(byref(job), self._count(logits))
        return sums, entropies

    def _count(self, scores: Tensor) -> int:
        """How many threads read scores [n, V], a row each."""
        return min(self._library.threads, len(scores)) if scores.numel() > FEW else 1


class NativeHeads(nn.Module):
    """The heads in C: the heads' residual layers at one position, and the best of logits.

    Heads of bf16 become whole numbers of 8 bits, 32 of them with one scale: a draft reads half as
    much, and with exact acceptance no text depends on what is drafted."""

    def __init__(
        self, heads: MedusaHeads, library: NativeLibrary, table: Blocks | None = None
    ) -> None:
        """table: the backbone's LM head if it is quantised, as the shortlist's rows are then."""
        super().__init__()
        self._library = library
        layers, count, self._size, _ = heads.weight.shape
        self._bias = heads.bias.detach().float().contiguous()
        self._job = structs.HeadStates(bias=self._bias.data_ptr())
        self._job.layers, self._job.heads, self._job.size = layers, count, self._size
        self.panels: Tensor
        self.root_panels: Tensor
        self._job.weights, panels = self._packed(heads.weight.flatten(0, 1))
        self.register_buffer("panels", panels, persistent=False)
        if heads.root_weight is not None:
            self._job.roots, panels = self._packed(heads.root_weight)
            self.register_buffer("root_panels", panels, persistent=False)
        self._most = 0  # guesses of a head that `guesses` finds
        if heads.short is not None:
            chosen = heads.shortlist
            assert chosen is not None
            listed = None if table is None else table.rows(chosen)
            heads.short = NativeLinear(heads.short, library, listed)
            self._names = chosen.contiguous()
            self._most = len(chosen)
        self._short: Any = heads.short

    def _packed(self, matrices: Tensor) -> tuple[Weights, Tensor]:
        """Matrices [n, d, d] in panels, one behind the other -> their description for C,
        and the panels."""
        if (
            len(matrices)
            and matrices.dtype == torch.bfloat16
            and matrices.shape[2] % WIDEST_PANEL == 0
        ):
            packed = pack_blocks(Blocks.of(matrices.flatten(0, 1)), self._library.panel_width)
            assert packed is not None
            return packed
        return pack_floats(matrices, self._library.panel_width)

    def hidden_states(self, hidden: Tensor, root: Tensor | None, heads: int) -> Tensor:
        """hidden [1, d], root [1, d] -> float32 [heads, 1, d]."""
        x, job = hidden.float().contiguous(), self._job
        e = x if root is None else root.float().contiguous()
        job.root = e.data_ptr()
        out = torch.empty(2 * heads, 1, self._size)
        job.hidden, job.states, job.used = x.data_ptr(), out.data_ptr(), heads
        self._library.c.head_states(byref(job), self._library.threads)
        return out[:heads]

    def can_guess(self, count: int) -> bool:
        """Whether `guesses` finds so many of each head: with a shortlist as long."""
        return count <= self._most

    def guesses(
        self, hidden: Tensor, root: Tensor | None, heads: int, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden and root [1, d] -> of each head the best logits float32 and their tokens
        int64 [heads, count], falling, and log(sum(exp)) of all of the shortlist float32 [heads]."""
        x = hidden.float().contiguous()
        e = x if root is None else root.float().contiguous()
        states, logits = torch.empty(2 * heads, self._size), torch.empty(heads, self._short.outs)
        values, tokens = torch.empty(heads, count), torch.empty(heads, count, dtype=torch.long)
        sums = torch.empty(heads)
        job = structs.HeadGuesses(self._job, self._short.job(states, logits))
        job.states.hidden, job.states.root = x.data_ptr(), e.data_ptr()
        job.states.states, job.states.used = states.data_ptr(), heads
        addresses = (t.data_ptr() for t in (logits, values, sums, tokens))
        job.guesses = structs.Guesses(*addresses, *logits.shape, count)
        job.names = self._names.data_ptr()
        self._library.c.head_guesses(byref(job), self._library.threads)
        return values, tokens, sums


class NativeStep(TorchStep):
    """A StepBackend for a backbone whose decoder and LM head are native."""

    def __init__(self, backbone: Backbone, decoder: NativeDecoder, library: NativeLibrary) -> None:
        super().__init__(backbone)
        self.rows: NativeRows = NativeRows(library)
        count = library.threads
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


def can_run(model: Any, storage: WeightStorage = UNCHANGED) -> bool:
    """Whether the C library can run this model's decoder, asked before any module is replaced: a
    supported config, on a CPU in fp32 or bf16 or to be stored so, layers that merge, a plain LM
    head."""
    decoder, config = model.get_decoder(), model.config.get_text_config()
    layers = list(getattr(decoder, "layers", ()))
    if not layers or not all(is_plain_layer(layer) for layer in layers):
        return False
    if type(model.get_output_embeddings()) is not nn.Linear:
        return False
    dtypes, devices = {p.dtype for p in model.parameters()}, {p.device for p in model.parameters()}
    is_one = storage.dtype is not None or (len(dtypes) == 1 and dtypes <= set(TOLERANCES))
    return is_one and devices == {torch.device("cpu")} and native_supports(config.to_dict())


def attach(
    backbone: Backbone,
    heads: MedusaHeads | None,
    library: NativeLibrary,
    storage: WeightStorage = UNCHANGED,
) -> NativeStep | None:
    """Replace the decoder of a backbone whose layers are packed, its LM head, and the products of
    its Medusa heads by the C library's -> its steps; None, with a warning, where the output differs
    from PyTorch's. storage: how the LM head's weight is stored."""
    twin = backbone.decoder
    if not isinstance(twin, FusedDecoder):
        return None
    native = NativeDecoder(twin, list(backbone.cache.layers.layers), library)
    off_by = partial(_difference, backbone, twin, native)
    if not agrees(DISABLED, off_by, TOLERANCES[backbone.dtype]):
        backbone.decoder = twin
        return None
    backbone.decoder, backbone.lm_head.pads_rows = native, False
    head: Any = backbone.lm_head.linear
    is_tied = head.weight is backbone.model.get_input_embeddings().weight
    place, weight = "model.embed_tokens" if is_tied else "lm_head", head.weight.detach()
    table = storage([f"{place}.weight"], weight)
    lm_head = NativeLinear(head, library, table)
    backbone.lm_head.linear = lm_head
    backbone.model.set_output_embeddings(lm_head)
    if heads is not None and heads.weight.dtype == backbone.dtype:
        heads.twin = NativeHeads(heads, library, table if isinstance(table, Blocks) else None)
    return NativeStep(backbone, native, library)


@torch.inference_mode()
def _difference(backbone: Backbone, twin: FusedDecoder, native: NativeDecoder) -> float:
    """The largest difference of C's states from those of the torch twin in fp32, with the same
    weights, as a share of the largest state. In 16 bits the twin itself is far off where keys are
    large (Qwen2). Leaves the backbone with C's decoder and an empty cache."""
    ids = torch.arange(23) * 7 % backbone.vocabulary
    expected = _fp32_states(backbone, twin, ids)
    backbone.decoder = native
    backbone.cache.crop(0)
    states = torch.cat([backbone.run_chunk(part) for part in ids.split([13, 1, 1, 8])])
    backbone.cache.crop(0)
    return share(states, expected)


def _fp32_states(backbone: Backbone, twin: FusedDecoder, ids: Tensor) -> Tensor:
    """The states float32 [n, d] of a causal pass of torch over ids int64 [n], from embeddings in
    fp32 on: all that follows is computed in fp32 too, and what the weights are stored in stays."""
    layers = backbone.cache.layers.layers
    shapes = [Shape(t.shape[1], t.shape[3], t.device) for x in layers for t in (x.keys, x.values)]
    cache = KVCache(shapes, len(ids), torch.float32)
    places = torch.arange(len(ids))
    mask = backbone.causal_mask(places, backbone.windows[0]).float()
    hook = twin.stock.embed_tokens.register_forward_hook(lambda *called: called[-1].float())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: a norm's weight has another dtype
            out = twin(ids[None], places[None], cache.layers, mask[None, None])
    finally:
        hook.remove()
    states: Tensor = out.last_hidden_state[0]
    return states
