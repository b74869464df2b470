"""The events of an answer: Readings of a long prompt, Prefilled, Steps, Finished. No torch."""

from dataclasses import dataclass
from typing import Any, Literal, Self

VERSION = 1
Reason = Literal["eos", "length", "stop", "context", "cancelled", "error"]
Source = Literal[
    "heads",
    "draft",
    "text",
    "both",
    "draft and text",
    "first draft",
    "second draft",
    "both drafts",
    "first draft and text",
    "second draft and text",
    "both drafts and text",
]


@dataclass(frozen=True)
class DraftRecord:
    """The candidate tree of one step, a list entry per node, the root first.

    probabilities: the backbone's p of the node at its parent. entropies (nats), thresholds (None
    unless typical) and sampled (the backbone's own token) describe the node as a parent. ranks: the
    node's place among its head's predictions. texts, next_text: the text of each token and of the
    next token, "" if there is none; filled in by Answer. Values that do not exist are None.
    guesses[k]: head k's predictions, most probable first, if only a part of the tree was drafted.
    sources: what proposed each node, None for the root: the heads, a draft model, the text, or
    "both", the heads and the text; of two draft models which; empty if all are the drafter's
    own (for "auto", the heads').
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    ranks: tuple[int | None, ...]
    draft_probabilities: tuple[float | None, ...]
    probabilities: tuple[float | None, ...]
    entropies: tuple[float | None, ...]
    thresholds: tuple[float | None, ...]
    sampled: tuple[int | None, ...]
    texts: tuple[str, ...] = ()
    next_text: str = ""
    guesses: tuple[tuple[int, ...], ...] = ()
    sources: tuple[Source | None, ...] = ()


@dataclass(frozen=True)
class Stats:
    """Figures of one answer. seconds: decoding without prefill. steps: backbone passes after it.

    acceleration_rate: tokens emitted by steps (an end token counts) / steps; None without steps.
    plain_step_seconds: a plain step of the answer, or one timed right after it; None if none was.
    busy_seconds: `seconds` without the processor time of other programs; None if unknown.
    """

    new_tokens: int
    steps: int
    acceleration_rate: float | None
    seconds: float
    prefill_seconds: float
    tokens_per_second: float | None
    plain_step_seconds: float | None = None
    busy_seconds: float | None = None

    @property
    def emitted(self) -> int:
        """Tokens that steps gave, an end token included."""
        return round((self.acceleration_rate or 0.0) * self.steps)

    @property
    def step_seconds(self) -> float | None:
        """Mean time of a step, without other programs' time; None without steps."""
        return (self.busy_seconds or self.seconds) / self.steps if self.steps else None

    @classmethod
    def of(
        cls,
        new_tokens: int,
        steps: int,
        emitted: int,
        seconds: float,
        prefill_seconds: float,
        busy_seconds: float | None = None,
    ) -> Self:
        """From the counts of one answer; emitted: tokens that steps gave, an end token included."""
        return cls(
            new_tokens=new_tokens,
            steps=steps,
            acceleration_rate=emitted / steps if steps else None,
            seconds=seconds,
            prefill_seconds=prefill_seconds,
            tokens_per_second=emitted / seconds if seconds else None,
            busy_seconds=busy_seconds,
        )


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log probability by the backbone, before temperature and filters. text: its bytes,
    which may be part of a character; top: the most probable tokens there with their logprobs."""

    text: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True)
class Reading:
    """Progress of a long prompt: `tokens` of its `prompt_tokens` are in the cache. Not part of
    traces."""

    tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class Prefilled:
    """The prompt is in the cache and the first token is known. text, reasoning: what is certain of
    the answer and of its reasoning so far. settings: all settings, resolved. backend: what runs the
    steps. left_out: how many of the oldest messages the context has no room for. backbone: that of
    the heads, if it is not the checkpoint itself. notes: other changes to the conversation, a
    sentence each. logprobs: of token_ids, if requested; not part of traces."""

    model: str
    precision: str
    device: str
    settings: dict[str, Any]
    prompt_token_ids: tuple[int, ...]
    prompt_tokens: int
    reused_tokens: int
    token_ids: tuple[int, ...]
    text: str
    seconds: float
    context: int = 0
    version: int = VERSION
    backend: str = ""
    left_out: int = 0
    backbone: str = ""
    notes: tuple[str, ...] = ()
    reasoning: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Step:
    """One pass of the backbone. path: the accepted nodes, the root (0) first.

    token_ids: the accepted path after the root, then the next token. heads_seconds: the part of
    `seconds` spent on the draft; backbone_seconds: the part spent on the backbone's pass with its
    LM head, and on the draft too if both are one recording (then heads_seconds is 0). nodes: of the
    draft, 1 for plain decoding. draft: None if details were not requested. budget: the reason for
    the number of nodes, "all" or in words (budget.py). busy_seconds: see Stats. logprobs: see
    Prefilled.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    seconds: float
    path: tuple[int, ...]
    draft: DraftRecord | None = None
    heads_seconds: float = 0.0
    backbone_seconds: float = 0.0
    nodes: int = 1
    budget: str = ""
    busy_seconds: float = 0.0
    reasoning: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Learnt:
    """What a drafter's budget has learnt by the end of an answer. plain_seconds: the time of a step
    without a draft. costs[i]: of a step of nodes[i] nodes with its draft, in plain steps. steps:
    how many it has learnt from. trust: accepted nodes over the number that the drafter promised."""

    plain_seconds: float
    nodes: tuple[int, ...]
    costs: tuple[float, ...]
    steps: int
    trust: float


@dataclass(frozen=True)
class Finished:
    """The end. token_ids: everything generated, without the end token.

    prefilled.text + every step.text + tail = text; the rest of `reasoning` after the steps' is its
    tail. message: the cause when reason is "error". learnt: None without a budget.
    """

    reason: Reason
    token_ids: tuple[int, ...]
    text: str
    tail: str
    stats: Stats
    message: str = ""
    reasoning: str = ""
    learnt: Learnt | None = None


Event = Prefilled | Step | Finished
Told = Event | Reading
