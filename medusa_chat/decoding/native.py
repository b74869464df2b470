"""Native: a Llama-like decoder of fp32 on a CPU as one call into kernels/decoder.c.

A step of a small model is a hundred operators, each of which takes torch longer to begin than to
do. One call does them all, and sums every number in one order: a tree's rows have the bits of
plain decoding's. The twin is the decoder of merged layers (submodules.py), which also stays for
whatever this one does not do.
"""

import ctypes
from ctypes import (
    POINTER,
    Structure,
    addressof,
    byref,
    c_float,
    c_int64,
    c_uint64,
    c_void_p,
    pointer,
)
from dataclasses import dataclass
from math import exp
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.acceptance import Judge, Position, own_tokens
from medusa_chat.decoding.drafters import Draft, TreeTensors
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.kv_cache import Layer
from medusa_chat.decoding.outcome import Outcome, record
from medusa_chat.decoding.parity import agrees
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.submodules import FusedDecoder, is_plain_layer

MOST_BYTES = 2**29  # of weights, which are held twice
WIDEST = 512  # of an attention head
LARGEST = 16384  # of a hidden state
FIXED_ROPES = ("default", "linear", "llama3", "yarn")  # whose angles do not follow the length
TOLERANCE = 1e-4  # against the twin, of the largest number
LANES = 8


class _Layer(Structure):
    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            *("before", "qkv", "qkv_bias", "out", "out_bias"),
            *("after", "gate_up", "gate_up_bias", "down", "down_bias", "keys", "values"),
        )
    )


class _Decoder(Structure):
    _fields_ = (
        *((n, c_int64) for n in ("count", "hidden", "heads", "kv_heads", "head_dim")),
        *((n, c_int64) for n in ("inner", "capacity", "vocabulary")),
        *((n, c_float) for n in ("epsilon", "scaling")),
        *((n, c_void_p) for n in ("embedding", "norm", "cosines", "sines")),
        ("layers", POINTER(_Layer)),
    )


class _Pass(Structure):
    _fields_ = (
        ("decoder", POINTER(_Decoder)),
        *((n, c_void_p) for n in ("tokens", "positions", "mask")),
        *((n, c_int64) for n in ("stride", "rows", "start", "threads")),
        *((n, c_void_p) for n in ("hidden", "work")),
    )


class _Proposal(Structure):
    _fields_ = (
        *((n, c_void_p) for n in ("panels", "bias", "lm_panels", "lm_bias", "hidden", "states")),
        *((n, c_void_p) for n in ("logits", "values", "sums", "places", "index", "tokens")),
        ("shares", c_void_p),
        *((n, c_int64) for n in ("layers", "heads", "used", "hidden_size", "size", "width")),
        *((n, c_int64) for n in ("nodes", "root", "threads")),
    )


class _Verdict(Structure):
    _fields_ = (
        *((n, c_void_p) for n in ("logits", "parents", "depths", "tokens", "own", "path")),
        *((n, c_void_p) for n in ("at_parent", "entropies", "noise", "sums", "thresholds")),
        ("seed", c_uint64),
        *((n, c_int64) for n in ("rows", "size", "place", "deepest", "threads", "is_typical")),
        *((n, c_int64) for n in ("length", "is_finite")),
        *((n, c_float) for n in ("temperature", "epsilon", "alpha")),
    )


class Team:
    """The library, and how many threads work together in it (see threads.py)."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.threads = threads
        self.run, self.linear, self.pack = library.run, library.linear, library.pack
        self.work_size = library.work_size
        self.propose, self.judge = library.propose, library.judge
        sizes = [c_int64] * 2
        self.run.argtypes, self.run.restype = [POINTER(_Pass)], c_int64
        self.linear.argtypes, self.linear.restype = [c_void_p] * 4 + [c_int64] * 4, None
        self.pack.argtypes, self.pack.restype = [c_void_p, c_void_p, *sizes], None
        for function, kind in ((self.propose, _Proposal), (self.judge, _Verdict)):
            function.argtypes, function.restype = [POINTER(kind)], None
        self.work_size.argtypes = [POINTER(_Decoder), *sizes, c_int64]
        self.work_size.restype = c_int64

    def panels(self, weight: Tensor) -> Tensor:
        """[outs, ins] -> [ceil(outs / 8), ins, 8], 0 beyond the last output."""
        outs, ins = weight.shape
        whole = weight.detach().contiguous()
        panels = torch.empty(-(-outs // LANES), ins, LANES)
        self.pack(whole.data_ptr(), panels.data_ptr(), outs, ins)
        return panels


class NativeLinear(nn.Module):
    """A linear of fp32 on a CPU, its weight laid out in panels: [..., ins] -> [..., outs]."""

    def __init__(self, linear: Any, team: Team) -> None:
        super().__init__()
        self.bias, self.weight = linear.bias, linear.weight
        self.panels: Tensor
        self.register_buffer("panels", team.panels(linear.weight), persistent=False)
        self._team = team

    def forward(self, hidden: Tensor) -> Tensor:
        outs, ins = self.weight.shape
        x = hidden.reshape(-1, ins).contiguous()
        y = torch.empty(len(x), outs)
        bias = None if self.bias is None else self.bias.data_ptr()
        threads = self._team.threads
        self._team.linear(
            x.data_ptr(), self.panels.data_ptr(), bias, y.data_ptr(), len(x), ins, outs, threads
        )
        return y.view(*hidden.shape[:-1], outs)


class NativeDecoder(nn.Module):
    """A decoder of merged layers as one call. Called as FusedDecoder is; what is not one text
    behind this cache goes to it."""

    def __init__(self, twin: FusedDecoder, layers: list[Layer], team: Team) -> None:
        super().__init__()
        self._twin, self._team = twin, team
        stock = twin.stock
        capacity = layers[0].get_max_length()
        first = stock.layers[0]
        places = torch.arange(capacity)[None]
        embedding = stock.embed_tokens.weight
        cosines, sines = stock.rotary_emb(embedding[:1, None], position_ids=places)
        self._kept = [t[0].float().contiguous() for t in (cosines, sines)]
        self._layers = (_Layer * len(layers))()
        for layer, kv, out in zip(stock.layers, layers, self._layers, strict=True):
            self._fill(layer, kv, out)
        heads, kv_heads = (size // first.head_dim for size in first.sizes)
        self._decoder = _Decoder(
            *(len(layers), embedding.shape[1], heads, kv_heads, first.head_dim),
            *(first.down.in_features, capacity, len(embedding)),
            *(first.before.epsilon, first.scaling),
            *(embedding.data_ptr(), stock.norm.weight.data_ptr()),
            *(t.data_ptr() for t in self._kept[:2]),
            self._layers,
        )
        self.hidden = embedding.shape[1]
        self._pass = _Pass(pointer(self._decoder))
        self._work = torch.empty(0)

    def _fill(self, layer: Any, kv: Layer, out: _Layer) -> None:
        """Where what this layer reads lies; the panels stay with it."""
        assert kv.keys is not None and kv.values is not None
        out.before, out.after = layer.before.weight.data_ptr(), layer.after.weight.data_ptr()
        for name in ("qkv", "out", "gate_up", "down"):
            linear = getattr(layer, name)
            panels = self._team.panels(linear.weight)
            self.register_buffer(f"{name}_{len(self._kept)}", panels, persistent=False)
            self._kept.append(panels)
            setattr(out, name, panels.data_ptr())
            if linear.bias is not None:
                setattr(out, f"{name}_bias", linear.bias.data_ptr())
        out.keys, out.values = kv.keys.data_ptr(), kv.values.data_ptr()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: Any,
        attention_mask: Tensor,
        use_cache: bool = True,
    ) -> Any:
        kv = past_key_values.layers[0]
        if type(kv) is not Layer:
            return self._twin(input_ids, position_ids, past_key_values, attention_mask)
        rows, start, job = input_ids.shape[1], kv.start, self._pass
        mask = attention_mask[0, 0]
        if mask.stride(1) != 1:
            mask = mask.contiguous()
        job.threads = self._team.threads
        self._make_room(rows, start + rows, job.threads)
        hidden = torch.empty(1, rows, self.hidden)
        tokens, positions = input_ids.contiguous(), position_ids.contiguous()
        job.tokens, job.positions = tokens.data_ptr(), positions.data_ptr()
        job.mask, job.stride = mask.data_ptr(), mask.stride(0)
        job.rows, job.start, job.hidden = rows, start, hidden.data_ptr()
        if self._team.run(byref(job)):  # outside of the embeddings or the cache: the twin says so
            return self._twin(input_ids, position_ids, past_key_values, attention_mask)
        return Output(hidden)

    def _make_room(self, rows: int, keys: int, threads: int) -> None:
        keys = -(-keys // 256) * 256
        needed = self._team.work_size(byref(self._decoder), rows, keys, threads)
        if len(self._work) < needed:
            self._work = torch.empty(needed)
            self._pass.work = self._work.data_ptr()


class NativeHeads(nn.Module):
    """MedusaHeads' twin: their residual layers at one position, and what their logits propose."""

    def __init__(self, heads: MedusaHeads, lm_head: Any, team: Team) -> None:
        """lm_head: the backbone's, by now native (backbone.LogitHead)."""
        super().__init__()
        self._team = team
        layers, count, self._size, _ = heads.weight.shape
        panels = [team.panels(w) for layer in heads.weight for w in layer]
        whole = torch.stack(panels) if panels else torch.empty(0)
        self.panels: Tensor
        self.register_buffer("panels", whole, persistent=False)
        self._bias = heads.bias.detach().contiguous()
        self._job = _Proposal(whole.data_ptr(), self._bias.data_ptr())
        self._job.layers, self._job.heads, self._job.hidden_size = layers, count, self._size
        self._lm = lm_head.linear if heads.is_shared and lm_head.is_plain else None
        self._room: dict[tuple[int, int], list[Tensor]] = {}

    def _fresh(self) -> _Proposal:
        """A job that names the heads and nothing else yet."""
        job = _Proposal.from_buffer_copy(self._job)
        job.threads = self._team.threads
        return job

    def hidden_states(self, hidden: Tensor, heads: int) -> Tensor:
        """[1, d] -> [heads, 1, d]."""
        x, out, job = hidden.contiguous(), torch.empty(heads, 1, self._size), self._fresh()
        job.hidden, job.states, job.used = x.data_ptr(), out.data_ptr(), heads
        self._team.propose(byref(job))
        return out

    def best(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """[K, V] -> values, tokens [K, count] and log(sum(exp)) [K]."""
        logits, job = logits.contiguous(), self._fresh()
        job.used, job.size, job.width = *logits.shape, count
        values, sums = torch.empty(job.used, count), torch.empty(job.used)
        places = torch.empty(job.used, count, dtype=torch.long)
        job.logits, job.values = logits.data_ptr(), values.data_ptr()
        job.sums, job.places = sums.data_ptr(), places.data_ptr()
        self._team.propose(byref(job))
        return values, places, sums

    def fill(
        self, hidden: Tensor, root: int, depth: int, width: int, index: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """See HeadsTwin."""
        if self._lm is None:
            return None
        x, job, nodes = hidden.contiguous(), self._fresh(), len(index)
        size = self._lm.weight.shape[0]
        room = self._room_for(depth, width, size)
        tokens, shares = torch.empty(nodes, dtype=torch.long), torch.empty(nodes)
        bias = self._lm.bias
        job.lm_panels = self._lm.panels.data_ptr()
        job.lm_bias = None if bias is None else bias.data_ptr()
        job.hidden, job.index = x.data_ptr(), index.data_ptr()
        job.states, job.logits, job.values, job.sums, job.places = (t.data_ptr() for t in room)
        job.tokens, job.shares = tokens.data_ptr(), shares.data_ptr()
        job.used, job.size, job.width, job.nodes, job.root = depth, size, width, nodes, root
        self._team.propose(byref(job))
        return tokens, shares

    def _room_for(self, depth: int, width: int, size: int) -> list[Tensor]:
        """Where a draft is worked out, the same at every step."""
        if (depth, width) not in self._room:
            shapes = ((depth, self._size), (depth, size), (depth, width), (depth,))
            room = [torch.empty(shape) for shape in shapes]
            room.append(torch.empty(depth, width, dtype=torch.long))
            self._room[depth, width] = room
        return self._room[depth, width]


class NativeJudge(Judge):
    """What is read from logits of fp32 on a CPU, without torch's operators."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._noise = torch.empty(0)

    def argmax(self, logits: Tensor) -> Tensor:
        """int64 [n]; the lowest index wins a tie."""
        return self._own(logits, None, 0, 0, 0.0)

    def own_tokens(
        self, logits: Tensor, tensors: TreeTensors, position: Position, settings: GenerationSettings
    ) -> Tensor:
        """See acceptance.own_tokens; top-k and top-p are torch's."""
        if settings.is_greedy:
            return self.argmax(logits)
        if settings.top_k or settings.top_p < 1 or not isinstance(position, int):
            return own_tokens(logits, tensors, position, settings)
        assert settings.seed is not None, "a sampling run needs its seed resolved"
        return self._own(logits, tensors, position, settings.seed, settings.temperature)

    def _own(
        self,
        logits: Tensor,
        tensors: TreeTensors | None,
        position: int,
        seed: int,
        temperature: float,
    ) -> Tensor:
        logits = logits.contiguous()
        own = torch.empty(len(logits), dtype=torch.long)
        job = self._job(logits, seed, position, temperature)
        job.own = own.data_ptr()
        if tensors is not None:
            self._add_noise(job, tensors)
        self._team.judge(byref(job))
        return own

    def _add_noise(self, job: _Verdict, tensors: TreeTensors) -> None:
        """Room for the noise of every depth."""
        job.deepest, job.depths = tensors.paths.shape[1] - 1, tensors.depths.data_ptr()
        if self._noise.numel() < (job.deepest + 1) * job.size:
            self._noise = torch.empty((job.deepest + 1) * job.size)
        job.noise = self._noise.data_ptr()

    def figures(self, draft: Draft, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """See Judge.figures."""
        logits = logits.contiguous()
        found = torch.empty(3, len(logits))  # log-probabilities, entropies, and what is worked in
        job = self._job(logits, 0, 0, temperature)
        job.parents, job.tokens = draft.tensors.parents.data_ptr(), draft.tokens.data_ptr()
        job.at_parent, job.entropies, job.sums = (row.data_ptr() for row in found)
        self._team.judge(byref(job))
        return found[0], found[1]

    def decide(
        self,
        draft: Draft,
        logits: Tensor,
        position: Position,
        settings: GenerationSettings,
        details: bool,
    ) -> Outcome | None:
        """See Referee: exact and typical acceptance, without top-k and top-p."""
        is_typical = settings.acceptance == "typical" and not settings.is_greedy
        is_exact = settings.acceptance == "exact" or settings.is_greedy
        is_cut = (settings.top_k or settings.top_p < 1) and not settings.is_greedy
        if not (is_typical or is_exact) or (is_cut and is_exact) or not isinstance(position, int):
            return None
        logits, tensors, n = logits.contiguous(), draft.tensors, len(draft.tree)
        job = self._job(logits, settings.seed or 0, position, settings.temperature)
        own, path = (c_int64 * n)(), (c_int64 * n)()
        job.parents, job.depths = tensors.parents.data_ptr(), tensors.depths.data_ptr()
        job.tokens, job.own, job.path = draft.tokens.data_ptr(), addressof(own), addressof(path)
        job.is_typical = is_typical
        job.epsilon, job.alpha = settings.posterior_threshold, settings.posterior_alpha
        if settings.temperature > 0 and not is_typical:
            self._add_noise(job, tensors)
        figures = [(c_float * n)() for _ in range(4)]
        if details or is_typical:
            places = (addressof(row) for row in figures)
            job.at_parent, job.entropies, job.sums, job.thresholds = places
        self._team.judge(byref(job))
        tokens, chosen = draft.tokens.tolist(), own[:]
        made = None
        if details:
            shares = None if draft.probabilities is None else draft.probabilities.tolist()
            limits = figures[3][:] if is_typical else None
            likely = [exp(x) for x in figures[0]]
            made = record(draft, tokens, chosen, likely, figures[1][:], limits, shares)
        taken = path[: job.length]
        return Outcome(taken, tokens, chosen[taken[-1]], bool(job.is_finite), made)

    def _job(self, logits: Tensor, seed: int, position: int, temperature: float) -> _Verdict:
        job = _Verdict(logits.data_ptr(), seed=seed, place=position, temperature=temperature)
        job.rows, job.size, job.threads = *logits.shape, self._team.threads
        return job


@dataclass(frozen=True)
class Output:
    """last_hidden_state [1, n, d] after the final norm, as transformers calls it."""

    last_hidden_state: Tensor


def can_run(model: Any) -> bool:
    """Whether this decoder can be run natively, before any of it is replaced: fp32 on a CPU,
    layers that merge, whole vectors, rotary angles that do not follow the text's length."""
    decoder, config = model.get_decoder(), model.config.get_text_config()
    layers = list(getattr(decoder, "layers", ()))
    if not layers or not all(is_plain_layer(layer) for layer in layers):
        return False
    weights = [p for p in model.parameters()]
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    attention, mlp = layers[0].self_attn, layers[0].mlp
    widths = (mlp.up_proj.out_features, attention.o_proj.out_features)
    width = attention.q_proj.out_features + 2 * attention.k_proj.out_features
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        all(p.dtype == torch.float32 and p.device.type == "cpu" for p in weights)
        and sum(p.nbytes for p in weights) <= MOST_BYTES
        and rope in FIXED_ROPES
        and all(size % LANES == 0 for size in (*widths, width))
        and attention.head_dim <= WIDEST
        and attention.o_proj.out_features <= LARGEST
        and attention.head_dim % 2 == 0
        and len(kinds) == 1
    )


def adopt(backbone: Any, heads: MedusaHeads | None, team: Team) -> bool:
    """Let a backbone whose model `can_run` decode natively, with its LM head, its Medusa heads and
    its judge; whether it does: not where the numbers differ from the twin's."""
    twin = backbone.decoder
    if not isinstance(twin, FusedDecoder):
        return False
    native = NativeDecoder(twin, list(backbone.cache.layers.layers), team)

    def difference() -> float:
        found = []
        for decoder in (twin, native):
            backbone.decoder = decoder
            backbone.cache.crop(0)
            ids = torch.arange(23) * 7 % backbone.vocabulary
            parts = [backbone.run_chunk(part) for part in ids.split([13, 1, 1, 8])]
            found.append(torch.cat(parts))
        backbone.cache.crop(0)
        return float((found[0] - found[1]).abs().max() / found[0].abs().max())

    with torch.inference_mode():
        is_right = agrees("the decoder runs by torch's operators", difference, TOLERANCE)
    backbone.decoder = native if is_right else twin
    if is_right:
        backbone.lm_head.linear = NativeLinear(backbone.lm_head.linear, team)
        backbone.judge = backbone.referee = NativeJudge(team)
        if heads is not None and heads.weight.dtype == torch.float32:
            heads.twin = NativeHeads(heads, backbone.lm_head, team)
    return is_right
