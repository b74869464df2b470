"""Backbone: a stock transformers model made ready for trees: decoder, LM head, masks, cache."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from medusa_chat.decoding import attention
from medusa_chat.decoding.attention import aligned, keep_cudnn_out
from medusa_chat.decoding.drafters import Draft, TreeTensors
from medusa_chat.decoding.families import needs_eager, refuse_unfit, windows
from medusa_chat.decoding.fused_layers import FusedDecoder, lean_decoder
from medusa_chat.decoding.kv_cache import KVCache
from medusa_chat.decoding.logit_head import LogitHead
from medusa_chat.decoding.node_mask import NodeMask
from medusa_chat.decoding.sampling import Rows
from medusa_chat.decoding.settings import MAX_NODES
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import ModelError


class Backbone:
    """A causal language model, its KV cache and its masks, for one text at a time.

    The model is stock; attention "medusa_tree" is ours (see attention.py), "sdpa" and "eager"
    transformers'. Raises ModelError for a family whose attention cannot hold a
    tree.
    """

    def __init__(
        self,
        model: Any,
        context: int,
        implementation: str = attention.NAME,
        numbers: torch.dtype | None = None,
    ):
        """numbers: dtype of keys, values and masks; None: the dtype of the weights."""
        self.model = model
        self.config = model.config.get_text_config()
        refuse_unfit(self.config)
        if needs_eager(self.config):
            implementation = "eager"
        self.attend_by(implementation)
        self.decoder: Any = lean_decoder(self.model.get_decoder(), implementation)
        self.lm_head = LogitHead(self.model.get_output_embeddings(), self.config)
        self.rows = Rows()  # what reads its logits; a load on CUDA puts kernels there
        parameters = list(model.parameters())
        first = next((p for p in parameters if not p.is_meta), parameters[0])  # not offloaded
        self.device, self.dtype = first.device, first.dtype
        keep_cudnn_out(self.device)
        self.numbers = numbers or first.dtype
        self.vocabulary = int(self.config.vocab_size)
        self.context = context
        self.windows = windows(self.config)
        shapes, devices = self._layers()
        self.cache = KVCache(shapes, devices, context + MAX_NODES, self.numbers)
        self._masks: dict[Tree, Tensor] = {}

    def attend_by(self, implementation: str) -> None:
        """Use the attention function of this name."""
        self.model.set_attn_implementation(implementation)
        self.implementation = implementation

    @property
    def takes_words(self) -> bool:
        """Whether the attention takes node masks, which need no tensor as long as the text."""
        return self.implementation in attention.TAKE_WORDS

    @property
    def beside(self) -> tuple[nn.Module, ...]:
        """Modules that may hold memory beside the model's own."""
        return tuple(m for m in (self.decoder, self.lm_head.linear) if isinstance(m, nn.Module))

    def run_tree(self, tokens: Tensor, tree: Tree, tensors: TreeTensors) -> Tensor:
        """One pass over the nodes of a tree: tokens int64 [n] -> hidden [n, d] after the final
        norm.

        Their keys and values lie after the cache's valid rows until `cache.keep` makes them valid.
        """
        length = self.cache.length
        if self.takes_words:
            masks = {w: NodeMask.of(tensors, w).behind(length) for w in self.windows}
        else:
            masks = {w: self._tree_mask(tree, tensors, w) for w in self.windows}
        return self._run(tokens, length + tensors.depths, masks)

    def run_draft(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """One pass over the n nodes of a draft: hidden [n, d] and logits [n, V], in the model's
        dtype."""
        hidden = self.run_tree(draft.tokens, draft.tree, draft.tensors)
        return hidden, self.lm_head(hidden)

    def run_chunk(self, tokens: Tensor) -> Tensor:
        """One causal pass over the next tokens int64 [q] of the text -> hidden [q, d]; the cache is
        extended by them."""
        start, count = self.cache.length, len(tokens)
        places = torch.arange(start, start + count, device=self.device)
        mask = {w: self._causal_mask(places, w) for w in self.windows}
        hidden = self._run(tokens, places, mask)
        self.cache.extend(count)
        return hidden

    def _run(self, tokens: Tensor, positions: Tensor, masks: dict[int | None, Tensor]) -> Tensor:
        self.cache.begin()
        if isinstance(self.decoder, nn.Module | FusedDecoder):  # the C library takes any mask
            masks = {w: aligned(m) if m.is_floating_point() else m for w, m in masks.items()}
        return self.run_fixed(tokens, positions, masks, self.cache.layers)

    def run_fixed(
        self, tokens: Tensor, positions: Tensor, masks: dict[int | None, Tensor], layers: Any
    ) -> Tensor:
        """One pass with the caller's cache layers and masks: tokens and positions int64 [n], masks
        by window, [n, s] or node masks -> hidden [n, d]. It never waits for the device."""
        out = self.decoder(
            input_ids=tokens[None],
            position_ids=positions[None],
            past_key_values=layers,
            attention_mask=self._by_kind(masks),
            use_cache=True,
        )
        hidden: Tensor = out.last_hidden_state[0].to(self.device)
        return hidden

    def _by_kind(self, masks: dict[int | None, Tensor]) -> Any:
        """One mask, or a mask per kind of layer where the model has both kinds."""
        four = {window: mask[None, None] for window, mask in masks.items()}
        if len(four) == 1:
            return next(iter(four.values()))
        return {
            "full_attention": four[None],
            "sliding_attention": next(m for w, m in four.items() if w is not None),
        }

    def _tree_mask(self, tree: Tree, tensors: TreeTensors, window: int | None) -> Tensor:
        """Additive mask [n, length + n]: the whole text before the tree, then the ancestors."""
        length, count = self.cache.length, len(tree)
        buffer = self._masks.get(tree)
        if buffer is None:
            if len(self._masks) > 32:
                self._masks.clear()
            buffer = torch.zeros(count, self.cache.capacity, dtype=self.numbers, device=self.device)
            buffer[:, -count:].masked_fill_(~tensors.ancestors, -torch.inf)
            self._masks[tree] = buffer
        mask = buffer[:, self.cache.capacity - count - length :]
        if window is None or length + tree.depth < window:
            return mask
        places = torch.arange(length, device=self.device)
        places = torch.cat((places, length + tensors.depths))
        seen = length + tensors.depths[:, None] - places
        return mask.masked_fill(seen >= window, -torch.inf)

    def _causal_mask(self, places: Tensor, window: int | None) -> Tensor:
        """Additive mask [q, length + q] of the next tokens of the text."""
        distance = places[:, None] - torch.arange(int(places[-1]) + 1, device=self.device)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        zeros = torch.zeros(distance.shape, dtype=self.numbers, device=self.device)
        mask: Tensor = zeros.masked_fill(hidden, -torch.inf)
        return mask

    @torch.no_grad()
    def _layers(self) -> tuple[list[tuple[torch.Size, torch.Size]], list[torch.device]]:
        """Shapes of each layer's keys and values, and the device where it computes them, from a
        pass over one token."""
        cache = DynamicCache(config=self.config)
        probe = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        try:
            self.model.get_decoder()(input_ids=probe, past_key_values=cache, use_cache=True)
            shapes = [(layer.keys.shape, layer.values.shape) for layer in cache.layers]
            return shapes, [layer.keys.device for layer in cache.layers]
        except (AttributeError, TypeError) as error:
            family = self.config.model_type
            raise ModelError(
                f"model family {family} is not supported: it has no standard key-value cache"
            ) from error

    @torch.no_grad()
    def check(self) -> float:
        """Compare one tree step with causal passes over its paths, and our logits with the
        model's own. Returns the largest difference over the largest logit; raises ModelError
        when it is more than rounding."""
        text = [(7 * i + 3) % self.vocabulary for i in range(min(8, self.context - 4))]
        tree = Tree.from_choices([(0,), (1,), (0, 0), (0, 0, 0), (1, 0)])
        nodes = [(11 * i + 5) % self.vocabulary for i in range(len(tree))]
        ids = torch.tensor(nodes, device=self.device)
        self.cache.crop(0)
        self.run_chunk(torch.tensor(text, device=self.device))
        mine = self.lm_head(self.run_tree(ids, tree, TreeTensors.of(tree, self.device)))
        worst = 0.0
        for node in tree.leaves:
            path = list(tree.paths[node])
            whole = torch.tensor([text + [nodes[i] for i in path]], device=self.device)
            logits = self._reference(whole)[len(text) :]
            scale = float(logits.abs().max()) or 1.0
            worst = max(worst, float((mine[path] - logits).abs().max()) / scale)
        self.cache.crop(0)
        limit = 1e-3 if self.dtype == torch.float32 else 0.1
        if not worst <= limit:
            raise ModelError(
                f"model family {self.config.model_type} is not supported: a tree step differs from "
                f"a causal pass by {worst:.2g} of the largest logit, more than {limit:g}"
            )
        return worst

    def _reference(self, ids: Tensor) -> Tensor:
        """The model's own logits [t, V] of a causal pass with its eager attention."""
        self.model.set_attn_implementation("eager")
        try:
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self.model.set_attn_implementation(self.implementation)
        return logits
