"""NativeStep: a Llama-like decoder of fp32 or bf16 on a CPU as one call into C (kernels/decoder.c).

A step of a small model is a hundred operators, each of which takes torch longer to begin than to
do. One call does them all, and sums every number in one order, so a tree's rows are bit-equal to
plain decoding's. The rules of a step are not here (step.py). Its reference is the decoder of
merged layers (fused_layers.py), which also runs whatever this one does not support.
"""

from collections.abc import Callable, Sequence
from ctypes import addressof, byref, c_int64, pointer
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends import native_library as structs
from medusa_chat.decoding.backends.native_check import difference, limits_of
from medusa_chat.decoding.backends.native_experts import NativeExperts
from medusa_chat.decoding.backends.native_layers import PackedEmbedding, outputs_of
from medusa_chat.decoding.backends.native_library import NativeLibrary, Weights
from medusa_chat.decoding.backends.native_rows import NativeRows
from medusa_chat.decoding.backends.native_weights import (
    DISABLED,
    INPUTS,
    UNCHANGED,
    WIDEST_PANEL,
    NativeLinear,
    StoredRows,
    WeightStorage,
    pack_floats,
    pack_rows,
)
from medusa_chat.decoding.backends.parity import agrees
from medusa_chat.decoding.backends.replacements import is_plain_layer
from medusa_chat.decoding.draft import Draft, TreeTensors
from medusa_chat.decoding.families import native_supports
from medusa_chat.decoding.fused_layers import FusedDecoder, Mixture
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.kv_cache import KVCache, Layer
from medusa_chat.decoding.layer_forms import (
    LayerForm,
    angles_of,
    embedding_scale,
    norm_epsilon,
    norm_weight,
)
from medusa_chat.decoding.settings import MAX_NODES
from medusa_chat.decoding.step import TorchStep

READS = ("query", "key", "value")  # linears of kernels/pass.h, in order
LINEARS = ("out", "gate", "up", "down")
GATES = ("silu", "gelu", "clamped")  # in the order of kernels/pass.h


class Passes:
    """Passes through one decoder structure. job: what the next pass reads; the caller fills in how
    its rows see the text (kernels/pass.h). Tensors that it points at must outlive the pass.
    tapped: float32 [n, k, d], of the last pass the residual behind each of the layers that are
    tapped."""

    def __init__(self, decoder: structs.Decoder, library: NativeLibrary) -> None:
        self._decoder, self._library = decoder, library
        self.job = structs.Pass(pointer(decoder))
        self._work, self.tapped = torch.empty(0), torch.empty(0, 0, decoder.hidden)
        self._taps = torch.empty(0, dtype=torch.long)

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the residual behind these layers, counted from 0, of every pass from now on."""
        if not all(0 <= layer < self._decoder.count for layer in layers):
            raise IndexError(f"there are layers 0 to {self._decoder.count - 1}, not {layers}")
        self._taps = torch.tensor(layers, dtype=torch.long)
        self.job.taps, self.job.tap_count = self._taps.data_ptr(), len(layers)

    def run(self, tokens: Tensor, places: int, keys: int, states: Tensor | None = None) -> Tensor:
        """tokens int64 [n], and the address of as many places int64 -> float32 [n, d] after the
        final norm. keys: the most tokens that a row sees; states float32 [n, d]: what stands in
        place of the tokens' embeddings. Raises IndexError for a token or a place out of range."""
        rows, job = tokens.shape[0], self.job
        job.threads, job.keys = self._library.threads, keys
        self._make_room(rows, keys)
        hidden = torch.empty(rows, self._decoder.hidden)
        tokens = tokens.contiguous()
        if len(self._taps):
            self.tapped = torch.empty(rows, len(self._taps), self._decoder.hidden)
            job.tapped = self.tapped.data_ptr()
        job.states = None if states is None else states.data_ptr()
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
        self._capacity = layers[0].get_max_length()
        embedding, keys = stock.embed_tokens, layers[0].keys
        is_packed = isinstance(embedding, PackedEmbedding)
        self._kept: list[Tensor] = []
        self._angles: dict[str | None, tuple[int, int, int]] = {}
        self._layers = (structs.Layer * len(stock.layers))()
        for number, (layer, out) in enumerate(zip(stock.layers, self._layers, strict=True)):
            source = layer.form.source
            self._fill(layer, layers[number if source is None else source], out, stock.rotary_emb)
        self.structure = structs.Decoder(
            len(stock.layers),
            embedding.table.ins if is_packed else embedding.weight.shape[1],
            self._capacity,
            embedding.table.outs if is_packed else len(embedding.weight),
            keys.dtype == torch.bfloat16,
            norm_epsilon(stock.norm),
            embedding_scale(stock),
            None if is_packed else embedding.weight.data_ptr(),
            embedding.table.weights if is_packed else Weights(),
            self._norm(stock.norm),
            self._layers,
            self._own_inputs(stock),
        )
        self._passes = Passes(self.structure, library)
        self._places = (c_int64 * MAX_NODES)()  # of the rows of a step

    def _fill(self, layer: Any, kv: Layer, out: structs.Layer, rotary: Any) -> None:
        """Fill in what this layer computes, and the addresses of what it reads."""
        form: LayerForm = layer.form
        for name in ("before", "beside", "mixed", "after", "fed", "query_norm", "key_norm"):
            norm = getattr(layer, name)
            setattr(out, name, None if norm is None else self._norm(norm))
        width = self.library.panel_width
        for name, linear in zip(
            READS, outputs_of(layer.qkv.parts, form.outputs, width), strict=False
        ):
            setattr(out, name, linear)
        linears = outputs_of([layer.out], (layer.out.outs,), width)
        if layer.mixture is None:
            inner = layer.down.ins
            linears += outputs_of(layer.gate_up.parts, (inner, inner), width)
            linears += outputs_of([layer.down], (layer.down.outs,), width)
        else:
            experts: NativeExperts = layer.mixture.experts
            inner = experts.down.ins
            linears += [one.linear for one in (experts.gate, experts.up, experts.down)]
            out.experts = self._experts(layer.mixture)
        for name, linear in zip(LINEARS, linears, strict=True):
            setattr(out, name, linear)
        out.keys, out.values = kv.keys.data_ptr(), kv.values.data_ptr()
        out.heads, out.kv_heads = form.heads
        out.head_dim, out.inner, out.gates = form.width, inner, GATES.index(form.gate)
        out.window, out.cap = form.window or 0, form.cap or 0.0
        out.scaling, out.residual, out.scale = form.scaling, form.residual, 1.0
        if hasattr(layer.stock, "layer_scalar"):
            out.scale = float(layer.stock.layer_scalar)
        if layer.value_norm is not None:
            out.value_norm = self._floats(torch.ones(form.width))
        if layer.own_gate is not None:
            out.own_norm = self._norm(layer.own_norm)
            for name in ("own_gate", "own_out"):
                one = getattr(layer, name)
                setattr(out, name, structs.Linear(one.weights, one.bias_address))
        out.alpha, out.limit = form.clamp or (0.0, 0.0)
        if form.has_sinks:
            out.sinks = self._floats(layer.stock.self_attn.sinks)
        if form.is_turned:
            if form.kind not in self._angles:
                self._angles[form.kind] = self._angles_of(rotary, form)
            out.rotary, out.cosines, out.sines = self._angles[form.kind]
        if form.growth is not None:
            out.growth = self._floats(form.growth_at(torch.arange(self._capacity)))

    def _own_inputs(self, stock: Any) -> structs.OwnInputs:
        """What the layers read of a token beside the residual."""
        width = getattr(stock, "hidden_size_per_layer_input", 0)
        if not width:
            return structs.OwnInputs()
        table, projection = stock.embed_tokens_per_layer, stock.per_layer_model_projection
        is_packed = isinstance(table, PackedEmbedding)
        return structs.OwnInputs(
            None if is_packed else table.weight.data_ptr(),
            table.table.weights if is_packed else Weights(),
            structs.Linear(projection.weights, projection.bias_address),
            self._norm(stock.per_layer_projection_norm),
            width,
            table.scale if is_packed else float(table.embed_scale.to(table.weight.dtype)),
        )

    def _experts(self, mixture: Mixture) -> structs.Experts:
        """How experts are chosen. The router's weight is multiplied as it is, with unrounded
        rows."""
        form, router = mixture.form, mixture.router
        weights, panels = pack_floats(router.weight.detach().float(), self.library.panel_width)
        self._kept.append(panels)
        bias = getattr(router, "bias", None)
        linear = structs.Linear(weights, None if bias is None else self._floats(bias))
        return structs.Experts(linear, form.count, form.chosen, form.is_normed)

    def _angles_of(self, rotary: Any, form: LayerForm) -> tuple[int, int, int]:
        """How many numbers of a head are turned, and the addresses of their cosines and sines
        [capacity, R]."""
        places = torch.arange(self._capacity)[None]
        cosines, sines = angles_of(rotary, torch.zeros(1, 1, 1), places, form)
        return cosines.shape[-1], self._floats(cosines[0]), self._floats(sines[0])

    def _norm(self, norm: Any) -> int:
        """The address of what a norm multiplies by."""
        return self._floats(norm_weight(norm))

    def _floats(self, weight: Tensor) -> int:
        """The address of numbers in fp32, which this decoder keeps alive."""
        floats = weight.detach().float().contiguous()
        self._kept.append(floats)
        return floats.data_ptr()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: Any,
        attention_mask: Tensor | dict[str, Tensor],
        **_: Any,
    ) -> Any:
        """input_ids and position_ids int64 [1, n], attention_mask additive [1, 1, n, s], or one by
        kind of layer -> last_hidden_state float32 [1, n, d]. The cache is always used. Of the text
        before its rows a mask may hide what lies outside of a window alone. Raises as `run_rows`
        does."""
        if isinstance(attention_mask, dict):
            attention_mask = attention_mask["full_attention"]
        start, places = past_key_values.layers[0].start, position_ids[0].contiguous()
        mask = attention_mask[0, 0, :, start:].float().contiguous()
        hidden = self._run(input_ids[0], places.data_ptr(), mask, start)
        return SimpleNamespace(last_hidden_state=hidden[None])

    def tap(self, layers: Sequence[int]) -> None:
        """See Passes.tap."""
        self._passes.tap(layers)

    @property
    def tapped(self) -> Tensor:
        """See Passes."""
        return self._passes.tapped

    def run_rows(
        self,
        tokens: Tensor,
        depths: Sequence[int],
        mask: Tensor,
        start: int,
        states: Tensor | None = None,
    ) -> Tensor:
        """tokens int64 [n], so deep behind `start` tokens -> float32 [n, d] after the final norm;
        keys and values are written after those tokens, of which every row sees what its layer's
        window holds. mask additive float32 [n, n]: of the rows for each other, of which none sees
        one behind it. states float32 [n, d], contiguous: what the first layer gets in place of the
        tokens' embeddings, which only a layer that reads them beside it sees then. Raises
        IndexError for a token or a place out of range."""
        self._places[: len(depths)] = [start + depth for depth in depths]
        return self._run(tokens, addressof(self._places), mask, start, states)

    def _run(
        self, tokens: Tensor, places: int, mask: Tensor, start: int, states: Tensor | None = None
    ) -> Tensor:
        """See Passes.run. mask [n, n]."""
        job = self._passes.job
        job.mask, job.stride, job.start = mask.data_ptr(), mask.stride(0), start
        return self._passes.run(tokens, places, start + tokens.shape[0], states)


class NativeTexts:
    """Keys and values of `slots` texts of up to `capacity` tokens each, and passes over them.

    A text's row has the bits that it has in a pass alone, whatever texts are beside it. native: the
    decoder of one text, whose weights these passes read.
    """

    def __init__(self, native: NativeDecoder, slots: int, capacity: int) -> None:
        """capacity: at most the decoder's own."""
        decoder = native.structure
        # not zeros: memory is taken where a text writes, not for all that it might
        dtype = torch.bfloat16 if decoder.is_half else torch.float32
        self._layers = (structs.Layer * decoder.count)(*decoder.layers[: decoder.count])
        own = {
            layer.keys: torch.empty(2, slots, layer.kv_heads, capacity, layer.head_dim, dtype=dtype)
            for layer in self._layers
        }  # layers may share some
        self._kv = list(own.values())
        for layer in self._layers:
            keys, values = own[layer.keys]
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        fields = {name: getattr(decoder, name) for name, *_ in decoder._fields_}
        fields |= {"capacity": capacity, "layers": self._layers}
        self._passes = Passes(structs.Decoder(**fields), native.library)

    @staticmethod
    def bytes_of(native: NativeDecoder, capacity: int) -> int:
        """Memory of one text of `capacity` tokens."""
        decoder = native.structure
        layers = {layer.keys: layer for layer in decoder.layers[: decoder.count]}.values()
        numbers = 2 * capacity * sum(layer.kv_heads * layer.head_dim for layer in layers)
        return int(numbers * (2 if decoder.is_half else 4))

    def put(self, slot: int, cache: KVCache) -> None:
        """Copy the cache's text to a slot."""
        length, layers = cache.length, cache.layers.layers
        for (keys, values), layer in zip(self._kv, layers, strict=True):
            keys[slot, :, :length] = layer.keys[0, :, :length]
            values[slot, :, :length] = layer.values[0, :, :length]

    def run(self, tokens: Tensor, places: Tensor, slots: Tensor) -> Tensor:
        """tokens, places and slots int64 [n] -> float32 [n, d] after the final norm: of each slot
        the token behind the first `place` ones of its text. No slot may come twice. Raises
        IndexError for a token or a place out of range."""
        job = self._passes.job
        job.texts = slots.data_ptr()
        places = places.contiguous()
        return self._passes.run(tokens, places.data_ptr(), int(places.max()) + 1)


class NativeHeads(nn.Module):
    """The heads in C: the heads' residual layers at one position, and the best of logits.

    Heads of bf16 become whole numbers of 8 bits, 32 of them with one scale: a draft reads half as
    much, and with exact acceptance no text depends on what is drafted."""

    def __init__(
        self, heads: MedusaHeads, library: NativeLibrary, is_rounded: bool = False
    ) -> None:
        """is_rounded: whether the LM head is quantised: the shortlist's rows then have 8 bits."""
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
            short: Any = heads.short
            fits = is_rounded and short.weight.shape[1] % INPUTS == 0
            listed = StoredRows.of(short.weight) if fits else None
            heads.short = NativeLinear(short, library, listed)
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
            spare = -matrices.shape[1] % self._library.panel_width
            rows = StoredRows.of(F.pad(matrices, (0, 0, 0, spare)).flatten(0, 1))
            packed = pack_rows([rows], rows.outs, self._library)
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
        self.decoder = decoder
        self._lm_head: Any = backbone.lm_head.linear

    def run(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """The backbone's pass over n nodes -> hidden [n, d] after the final norm, float32, and
        logits [n, V] of that dtype."""
        start, mask = self.backbone.cache.length, _mask_of(draft.tensors)
        hidden = self.decoder.run_rows(draft.tokens, draft.tree.depths, mask, start)
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
    held = [p for p in model.parameters() if not p.is_meta]  # others are read as they are packed
    dtypes, devices = {p.dtype for p in held}, {p.device for p in held}
    is_one = storage.dtype is not None or (
        len(dtypes) == 1 and dtypes <= {torch.float32, torch.bfloat16}
    )
    return is_one and devices == {torch.device("cpu")} and native_supports(config.to_dict())


def attach(
    backbone: Backbone,
    heads: MedusaHeads | None,
    library: NativeLibrary,
    storage: WeightStorage = UNCHANGED,
    compare: Callable[[str, Callable[[], float], float], bool] = agrees,
) -> NativeStep | None:
    """Replace the decoder of a backbone whose layers are packed, its LM head, and the products of
    its Medusa heads by the C library's -> its steps; None, with a warning, where the output differs
    from PyTorch's. storage: how the LM head's weight is stored. compare: parity.agrees, or what
    knows its answer."""
    twin = backbone.decoder
    if not isinstance(twin, FusedDecoder):
        return None
    native = NativeDecoder(twin, list(backbone.cache.layers.layers), library)
    off_by = partial(difference, backbone, twin, native)
    if not compare(DISABLED, off_by, limits_of(twin)[backbone.dtype]):
        backbone.decoder = twin
        return None
    backbone.decoder, backbone.lm_head.pads_rows = native, False
    if not isinstance(backbone.lm_head.linear, NativeLinear):
        pack_lm_head(backbone.model, library, storage)
        backbone.lm_head.linear = backbone.model.get_output_embeddings()
    lm_head: Any = backbone.lm_head.linear
    if heads is not None and heads.weight.dtype == backbone.dtype:
        heads.twin = NativeHeads(heads, library, is_rounded=lm_head.panels.dtype == torch.uint8)
    return NativeStep(backbone, native, library)


def pack_lm_head(model: Any, library: NativeLibrary, storage: WeightStorage) -> None:
    """Replace the LM head of a model by a NativeLinear."""
    head = model.get_output_embeddings()
    is_tied = head.weight is getattr(model.get_input_embeddings(), "weight", None)
    place = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    packed = NativeLinear(head, library, storage(place, head.weight.detach()))
    model.set_output_embeddings(packed)
