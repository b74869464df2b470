"""MedusaHeads: the extra heads, computed together as one batched product."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MedusaHeads(nn.Module):
    """K heads of L residual layers each: x + SiLU(W x + b), then an LM head of its own or shared.

    Medusa, arXiv 2401.10774, section 2.1.1. Head k (from 0) predicts the token at t + k + 2 from
    the hidden state at t. weight [L, K, d, d], bias [L, K, d]; L may be 0. lm_weight [K, R, d], or
    [1, R, d] for one LM head of all, or None for heads that share the backbone's. token_map
    int64 [R]: which of the backbone's V tokens each row is; None where the rows are the tokens in
    order. New heads are zero, so that their logits are the LM head's.

    root_weight [K, d, d], or None as in the paper. With it the heads also read the root, the token
    at t + 1, which is certain when a draft is made: their input is h + R e(root), as in Hydra
    (arXiv 2402.05109) but for the first token only, so a draft still needs one pass of the heads.
    `embed` is the backbone's, see `read_roots`.

    With a shortlist (`shorten`) or a token map, only its tokens are drafted, and a step reads only
    their rows of the LM head.
    """

    def __init__(
        self,
        heads: int,
        hidden: int,
        layers: int = 1,
        vocabulary: int | None = None,
        one_lm: bool = False,
        dtype: torch.dtype | None = None,
        has_root: bool = False,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(layers, heads, hidden, hidden, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(layers, heads, hidden, dtype=dtype))
        root = torch.zeros(heads, hidden, hidden, dtype=dtype) if has_root else None
        self.root_weight: nn.Parameter | None
        self.register_parameter("root_weight", None if root is None else nn.Parameter(root))
        self.embed: Callable[[Tensor], Tensor] | None = None
        own = None
        if vocabulary is not None:
            own = nn.Parameter(torch.zeros(1 if one_lm else heads, vocabulary, hidden, dtype=dtype))
        self.lm_weight: nn.Parameter | None
        self.register_parameter("lm_weight", own)
        self.token_map: Tensor | None
        self.register_buffer("token_map", None)
        self.vocabulary = vocabulary
        self.short: nn.Module | None = None  # the shared LM head's rows of the shortlist
        self.shortlist: Tensor | None  # int64 [S] token ids; own LM heads have their rows first
        self.register_buffer("shortlist", None, persistent=False)
        # C versions of `hidden_states` at one position and of `guesses` (backends/native_step.py)
        self.twin: Any = None

    def __len__(self) -> int:
        return self.weight.shape[1]

    @property
    def is_shared(self) -> bool:
        """Whether the heads use the backbone's LM head."""
        return self.lm_weight is None

    def read_roots(self, embedding: nn.Module) -> None:
        """Use the backbone's embedding (int64 [n] -> [n, d]) if the heads read the root."""
        if self.root_weight is not None:
            self.embed = partial(embedded, embedding)  # not a submodule: it is the backbone's

    def hidden_states(self, hidden: Tensor, roots: Tensor, heads: int | None = None) -> Tensor:
        """hidden [n, d] and roots int64 [n] -> [K, n, d], the input of the LM head of each of the
        first `heads` heads."""
        root = None if self.embed is None else self.embed(roots).to(hidden.device)
        if self.twin is not None and len(hidden) == 1:
            states: Tensor = self.twin.hidden_states(hidden, root, heads or len(self))
            return states
        x = hidden.to(self.weight.dtype).expand(heads or len(self), *hidden.shape)
        if self.root_weight is not None:
            assert root is not None, "read_roots comes first"
            added = root.to(x.dtype).expand_as(x)
            x = torch.baddbmm(x, added, self.root_weight[: len(x)].transpose(1, 2))
        for weight, bias in zip(self.weight[:, :heads], self.bias[:, :heads], strict=True):
            x = x + F.silu(torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2)))
        return x

    def shorten(self, tokens: Sequence[int], lm_head: Any) -> bool:
        """Draft only these tokens. The text stays the same, since every drafted token is verified.
        Own LM heads move the rows of these tokens to the front, in place. lm_head:
        backbone.LogitHead, whose rows are copied for heads that share it.

        Returns whether it was done: not without tokens, and not for a shared LM head in 4 or 8
        bits.
        """
        if not tokens:
            return False
        if self.lm_weight is not None:
            listed = self._put_first(tokens, self.lm_weight)
            self.shortlist = listed if len(listed) else None
            return len(listed) > 0
        chosen = torch.tensor(sorted(set(tokens)), device=self.weight.device)
        short = lm_head.rows(chosen)
        if short is None:
            return False
        self.short, self.shortlist = short.linear, chosen.to(short.linear.weight.device)
        return True

    @torch.no_grad()
    def _put_first(self, tokens: Sequence[int], weight: Tensor) -> Tensor:
        """Move the rows of `tokens` in own LM heads [K or 1, R, d] to the front, head by head;
        returns the tokens int64 [S] that have one, in the order of their rows."""
        rows = weight.shape[1]
        names = self.token_map
        if names is None:
            names = torch.arange(rows, device=weight.device)
        is_listed = torch.isin(names, torch.tensor(tokens, device=names.device))
        order = torch.argsort(~is_listed, stable=True)
        for head in weight:
            head.copy_(head[order])
        self.token_map = names[order]
        return self.token_map[: int(is_listed.sum())]

    def draft_logits(
        self,
        hidden: Tensor,
        root: Tensor,
        lm_head: Callable[[Tensor], Tensor],
        heads: int,
        count: int,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [1, d] and root int64 [1] -> logits [heads, R] of the first `heads` heads, and the
        token int64 [R] of each column; None: all V tokens, in order. count: how many guesses will
        be taken from each row."""
        names = self.shortlist if self.shortlist is not None else self.token_map
        if names is None or count > len(names):
            return self(hidden, root, lm_head, heads)[:, 0], None
        states = self.hidden_states(hidden, root, heads)
        if self.lm_weight is not None:
            return self._own_logits(states, self.lm_weight[:, : len(names)])[:, 0], names
        finish: Any = getattr(lm_head, "finish", lambda logits: logits)
        weight: Any = getattr(self.short, "weight", states)  # a NativeLinear has none
        assert self.short is not None
        return finish(self.short(states[:, 0].to(weight.dtype))), names

    def guesses(
        self, hidden: Tensor, root: Tensor, lm_head: Any, heads: int, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best guesses of the first `heads` heads after hidden [1, d] and root int64 [1]:
        logits and tokens int64 [heads, count], falling, and log(sum(exp)) of all logits float32
        [heads]. lm_head: backbone.LogitHead."""
        if self.twin is not None and self.twin.can_guess(count):
            read = None if self.embed is None else self.embed(root)
            best: tuple[Tensor, Tensor, Tensor] = self.twin.guesses(hidden, read, heads, count)
            return best
        logits, names = self.draft_logits(hidden, root, lm_head, heads, count)
        values, places = logits.topk(count)
        sums = logits.float().logsumexp(-1)
        return values, places if names is None else names[places], sums

    def forward(
        self,
        hidden: Tensor,
        roots: Tensor,
        lm_head: Callable[[Tensor], Tensor],
        heads: int | None = None,
    ) -> Tensor:
        """hidden [n, d] and roots int64 [n], the token after each -> logits [K, n, V] of the first
        `heads` heads (all when None).

        lm_head: [m, d] -> [m, V], the backbone's, used where the heads have none. Tokens without a
        row in the token map have -inf.
        """
        x = self.hidden_states(hidden, roots, heads)
        if self.lm_weight is None:
            logits: Tensor = lm_head(x.flatten(0, 1)).unflatten(0, x.shape[:2])
            return logits
        logits = self._own_logits(x, self.lm_weight)
        if self.token_map is None:
            return logits
        whole = logits.new_full((*logits.shape[:2], self.vocabulary or 0), -torch.inf)
        return whole.index_copy(2, self.token_map, logits)

    @staticmethod
    def _own_logits(x: Tensor, weight: Tensor) -> Tensor:
        """x [K, n, d] by own LM heads [K or more, R, d], or one of all [1, R, d] -> [K, n, R]."""
        x = x.to(weight.dtype)
        if len(weight) == 1:
            return F.linear(x, weight[0])
        return torch.bmm(x, weight[: len(x)].transpose(1, 2))


def half_precision(hidden: Tensor) -> torch.autocast:
    """Lets heads in fp32 read hidden states in half precision."""
    is_half = hidden.dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(hidden.device.type, torch.bfloat16, enabled=is_half)


@torch.no_grad()
def embedded(embedding: nn.Module, roots: Tensor) -> Tensor:
    """The backbone's embedding of roots int64 [n] -> [n, d] in its dtype, each vector scaled to a
    root mean square of 1, since models differ in the size of their embeddings."""
    vectors: Tensor = embedding(roots)
    return F.rms_norm(vectors, vectors.shape[-1:], eps=1e-8)
