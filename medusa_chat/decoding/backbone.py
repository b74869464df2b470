"""Backbone: a stock transformers model made ready for trees: decoder, LM head, masks, cache."""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from medusa_chat.decoding import attention
from medusa_chat.decoding.acceptance import Rows
from medusa_chat.decoding.attention import NodeMask, additive, aligned, disable_cudnn_attention
from medusa_chat.decoding.draft import TreeTensors
from medusa_chat.decoding.families import needs_eager, refuse_unfit, windows
from medusa_chat.decoding.fused_layers import are_merged, lean_decoder
from medusa_chat.decoding.kv_cache import KVCache, layer_shapes
from medusa_chat.decoding.settings import CHUNK, CPU_CHUNK, MAX_NODES


class Backbone:
    """A causal language model, its KV cache and its masks, for one text at a time.

    The model is stock; its attention is ours (see attention.py), or transformers' "eager" where the
    family needs it. Raises ModelError for a family whose attention cannot hold a tree.

    On a CPU in 16 bits torch rounds a product of one row otherwise than a product of several
    (oneDNN, from 1,024 inputs on). A lone row is computed twice in one pass there, so that it has
    the bits that it has in a tree (LogitHead.pads_rows).
    """

    def __init__(self, model: Any, context: int) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        refuse_unfit(self.config)
        is_ours = are_merged(model.get_decoder()) or not needs_eager(model)
        self.attend_by(attention.NAME if is_ours else "eager")
        fix_frequencies(model, context)
        self.lm_head = LogitHead(self.model.get_output_embeddings(), self.config)
        self.rows = Rows()  # what reads its logits; a load on CUDA puts kernels there
        parameters = list(model.parameters())
        first = next((p for p in parameters if not p.is_meta), parameters[0])  # not offloaded
        self.device, self.dtype = first.device, first.dtype
        self.chunk = CPU_CHUNK if self.device.type == "cpu" else CHUNK
        disable_cudnn_attention(self.device)
        self.vocabulary = int(self.config.vocab_size)
        self.context = context
        self.windows = windows(self.config)
        decoder = self.model.get_decoder()
        shapes = layer_shapes(decoder, self.config, self.device)
        self.decoder: Any = lean_decoder(decoder)
        self.lm_head.pads_rows = self.device.type == "cpu" and self.dtype.itemsize == 2
        self.has_experts = any(_is_of_experts(*named) for named in model.named_modules())
        most = 2 * MAX_NODES if self.lm_head.pads_rows and self.has_experts else MAX_NODES
        self.cache = KVCache(shapes, context + most, self.dtype)
        self.is_tapped = False

    def attend_by(self, implementation: str) -> None:
        """Use the attention function of this name."""
        self.model.set_attn_implementation(implementation)
        self.implementation = implementation

    @property
    def takes_words(self) -> bool:
        """Whether the attention takes node masks, which need no tensor as long as the text."""
        return self.implementation in attention.TAKE_WORDS

    def tap(self, places: Sequence[int]) -> None:
        """Keep of every pass from now on what transformers calls hidden_states at these places,
        each the residual before the layer of that number, from 1 on."""
        self.is_tapped = bool(places)
        if not hasattr(self.decoder, "tap"):
            self.decoder = TappedDecoder(self.decoder)
        self.decoder.tap([place - 1 for place in places])

    @property
    def tapped(self) -> Tensor:
        """[n, k, d] of the last pass, see `tap`."""
        tapped: Tensor = self.decoder.tapped
        return tapped

    @property
    def beside(self) -> tuple[nn.Module, ...]:
        """Modules that may hold memory beside the model's own."""
        return tuple(m for m in (self.decoder, self.lm_head.linear) if isinstance(m, nn.Module))

    def run_tree(self, tokens: Tensor, tensors: TreeTensors) -> Tensor:
        """One pass over the nodes of a tree: tokens int64 [n] -> hidden [n, d] after the final
        norm.

        Their keys and values lie after the cache's valid rows until `cache.keep` makes them valid.
        """
        length = self.cache.length
        columns = torch.arange(length + len(tokens), device=self.device)
        masks = self.masks_behind(self.node_masks(tensors), length, columns)
        is_lone = len(tokens) == 1 or self.has_experts  # of a tree's rows one expert may get one
        twice = is_lone and self.lm_head.pads_rows
        return self._run(tokens, length + tensors.depths, masks, twice)

    def node_masks(self, tensors: TreeTensors) -> dict[int | None, NodeMask]:
        """A tree's masks behind any text, by window."""
        return {window: NodeMask.of(tensors, window) for window in self.windows}

    def masks_behind(
        self, masks: dict[int | None, NodeMask], length: Tensor | int, columns: Tensor
    ) -> dict[int | None, Tensor]:
        """The masks of a tree behind `length` tokens, a number or int64 [1], as the attention takes
        them: words, or what is added to scores at the places `columns` int64 [s], [n, s]."""
        words = {window: mask.behind(length) for window, mask in masks.items()}
        if self.takes_words:
            return words
        return {
            w: additive(words[w], mask.seen, columns, self.dtype, mask.has_window)
            for w, mask in masks.items()
        }

    def run_chunk(self, tokens: Tensor) -> Tensor:
        """One causal pass over the next tokens int64 [q] of the text -> hidden [q, d]; the cache is
        extended by them."""
        start, count = self.cache.length, len(tokens)
        places = torch.arange(start, start + count, device=self.device)
        mask = {w: self.causal_mask(places, w) for w in self.windows}
        hidden = self._run(tokens, places, mask, self.lm_head.pads_rows and count == 1)
        self.cache.extend(count)
        return hidden

    def _run(
        self, tokens: Tensor, positions: Tensor, masks: dict[int | None, Tensor], twice: bool
    ) -> Tensor:
        """twice: whether the rows are computed a second time beside themselves."""
        self.cache.begin()
        count = len(tokens)
        if twice:
            tokens, positions = tokens.repeat(2), positions.repeat(2)
            masks = {w: _doubled(mask) for w, mask in masks.items()}
        masks = {w: aligned(m) if m.is_floating_point() else m for w, m in masks.items()}
        return self.run_fixed(tokens, positions, masks, self.cache.layers)[:count]

    def run_fixed(
        self, tokens: Tensor, positions: Tensor, masks: dict[int | None, Tensor], layers: Any
    ) -> Tensor:
        """One pass with the caller's cache layers and masks: tokens and positions int64 [n], masks
        by window, [n, s] or node masks -> hidden [n, d]. It never waits for the device."""
        out = self.decoder(
            input_ids=tokens[None],
            position_ids=positions[None],
            past_key_values=layers,
            attention_mask=self.by_kind(masks),
            use_cache=True,
        )
        hidden: Tensor = out.last_hidden_state[0].to(self.device)
        return hidden

    def by_kind(self, masks: dict[int | None, Tensor]) -> Any:
        """Masks [n, s] by window -> one [1, 1, n, s], or one for each kind of layer where the model
        has both kinds."""
        four = {window: mask[None, None] for window, mask in masks.items()}
        if len(four) == 1:
            return next(iter(four.values()))
        return {
            "full_attention": four[None],
            "sliding_attention": next(m for w, m in four.items() if w is not None),
        }

    def causal_mask(self, places: Tensor, window: int | None) -> Tensor:
        """Additive mask [q, length + q] of the next tokens of the text."""
        distance = places[:, None] - torch.arange(int(places[-1]) + 1, device=self.device)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        zeros = torch.zeros(distance.shape, dtype=self.dtype, device=self.device)
        mask: Tensor = zeros.masked_fill(hidden, -torch.inf)
        return mask


class TappedDecoder:
    """A stock decoder that keeps the states behind some of its layers. tapped [n, k, d]: of the
    last pass."""

    def __init__(self, decoder: Any) -> None:
        self.stock, self._kept = decoder, dict[int, Tensor]()
        self._layers: Sequence[int] = ()

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the states behind these layers, counted from 0."""
        self._layers = layers
        for number in set(layers):
            self.stock.layers[number].register_forward_hook(
                lambda _module, _given, out, number=number: self._keep(number, out)
            )

    def _keep(self, number: int, out: Any) -> None:
        self._kept[number] = (out if isinstance(out, Tensor) else out[0])[0]

    @property
    def tapped(self) -> Tensor:
        return torch.stack([self._kept[number] for number in self._layers], 1)

    def __call__(self, **given: Any) -> Any:
        return self.stock(**given)


def _is_of_experts(name: str, module: nn.Module) -> bool:
    """Whether a module is one of several of which a row passes through some, or holds them."""
    return "expert" in f"{name}{type(module).__name__}".lower()


def _doubled(mask: Tensor) -> Tensor:
    """An additive mask [n, s + n] of rows behind s places, for the rows twice, of which neither n
    see the others: [2 n, s + 2 n]."""
    count = len(mask)
    before, own = mask[:, :-count], mask[:, -count:]
    apart = torch.full_like(own, -torch.inf)
    return torch.cat([torch.cat([before, own, apart], 1), torch.cat([before, apart, own], 1)])


class LogitHead:
    """The backbone's LM head with the scale or cap its family puts after it: [m, d] -> [m, V].

    is_wide: whether logits of a step are float32 where the weight has 16 bits: rounded to 16 bits
    the two largest of a row are often equal. A load on CUDA sets it (checkpoints/kernel_trial.py).
    pads_rows: whether a lone row is computed twice, see Backbone; not by C, which sums a row alike
    in any company.
    """

    is_wide = False
    pads_rows = False

    def __init__(self, linear: nn.Module, config: Any) -> None:
        self.linear = linear
        self.scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
        self.scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
        self.cap = getattr(config, "final_logit_softcapping", None)  # Gemma

    def __call__(self, hidden: Tensor) -> Tensor:
        """[m, d] -> [m, V], float32 where `is_wide` and the rows are a step's (those of a count of
        many keep their 16 bits and half the memory), else in the linear's dtype."""
        if self.pads_rows and len(hidden) == 1:
            return self(hidden.repeat(2, 1))[:1]
        if self.is_wide and self.can_widen(hidden):
            return self.finish(self.widened(hidden))
        logits: Tensor = self.linear(hidden).to(hidden.device)  # it may lie on another
        return self.finish(logits)

    def can_widen(self, hidden: Tensor) -> bool:
        """Whether `widened` takes the rows hidden [m, d], of any dtype: it has no derivative, and
        is not what autocast knows."""
        linear: Any = self.linear
        if torch.is_grad_enabled():
            return False
        if type(linear) is not nn.Linear and not getattr(linear, "is_own", False):
            return False
        weight = linear.weight
        fits = (hidden.dtype, hidden.device) == (weight.dtype, weight.device)
        return fits and len(hidden) <= MAX_NODES and hidden.dtype.itemsize == 2

    def widened(self, hidden: Tensor) -> Tensor:
        """[m, d] in 16 bits -> [m, V] float32, the sums of the product unrounded."""
        linear: Any = self.linear
        if type(linear) is not nn.Linear:  # a stored one, whose kernel leaves its sums so
            own: Tensor = linear.widened(hidden)
            return own
        logits = torch.mm(hidden, linear.weight.t(), out_dtype=torch.float32)
        return logits if linear.bias is None else logits.add_(linear.bias)

    def rows(self, tokens: Tensor) -> "LogitHead | None":
        """The LM head of the tokens int64 [S] alone, a copy of their rows: [m, d] -> [m, S], in
        bf16 of one that our C packed; None where rows cannot be taken: in 4 or 8 bits of
        bitsandbytes."""
        linear: Any = self.linear
        weight, bias = getattr(linear, "weight", None), getattr(linear, "bias", None)
        if hasattr(linear, "rows"):
            rows = linear.rows(tokens).bfloat16()
        elif weight is None or weight.dim() != 2 or not weight.is_floating_point():
            return None
        else:
            rows = weight.detach()[tokens.to(weight.device)]
        with torch.device("meta"):
            short = nn.Linear(rows.shape[1], len(rows), bias is not None)
        short.weight = nn.Parameter(rows, requires_grad=False)
        if bias is not None:
            chosen = bias.detach()[tokens.to(bias.device)].to(rows.dtype)
            short.bias = nn.Parameter(chosen, requires_grad=False)
        head = copy(self)
        head.linear = short
        return head

    def finish(self, logits: Tensor) -> Tensor:
        """logits [m, V] of the linear -> [m, V] in the same dtype, with the family's scale or cap
        applied."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits


BY_LENGTH = ("longrope", "dynamic")


def fix_frequencies(model: Any, context: int) -> None:
    """Give the model's rotary embeddings the frequencies of a text of `context` tokens for every
    text. Those of longrope and dynamic scaling depend on the last position of a pass: a tree
    reaches further than a row, and the cache keeps keys that were turned by others."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _fixed_rope(module, kinds, context)
        elif isinstance(kinds, Mapping):  # by the kind of a layer
            module.rope_type = {k: _fixed_rope(module, kinds[k], context, k) for k in kinds}


def _fixed_rope(module: Any, kind: str, context: int, layer: str | None = None) -> str:
    """The kind of rope that the module has afterwards."""
    if kind not in BY_LENGTH:
        return kind
    frequencies = getattr(module, f"{layer}_inv_freq" if layer else "inv_freq")
    device, by_layer = frequencies.device, {"layer_type": layer} if layer else {}
    chosen, _ = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=context, **by_layer)
    frequencies.copy_(chosen)
    return "default"
