"""The events of an answer: Readings of a long prompt, Prefilled, Steps, Finished. No torch."""

from dataclasses import dataclass
from typing import Any, Literal, Self

VERSION = 1
Reason = Literal["eos", "length", "stop", "context", "cancelled", "error"]
Source = Literal["heads", "text", "both"]


@dataclass(frozen=True)
class DraftRecord:
    """The candidate tree of one step, a list entry per node, the root first.

    probabilities: the backbone's p of the node at its parent. entropies (nats), thresholds (None
    unless typical) and sampled (the backbone's own token) speak of the node as a parent. ranks: the
    node's place among its head's predictions. texts: each token's own text, and next_text the next
    token's, "" where none came; filled in by Answer. None where a figure does not exist.
    guesses[k]: head k's predictions, the most probable first, where only a part of the tree was
    drafted. sources: what proposed each node, None for the root; empty where all are the
    drafter's own (of "auto" the heads).
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

    acceleration_rate: tokens emitted by steps (an end token counts) / steps; None without a step.
    plain_step_seconds: of a plain step timed beside the answer; None where none was.
    busy_seconds: of `seconds` without what other programs took of the processor; None if unknown.
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
        """Mean time of a step, without what other programs took; None where there was no step."""
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
    """How probable a token was to the backbone, before temperature and filters. text: its bytes,
    for it may be a part of a character; top: the most probable tokens there, with theirs."""

    text: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True)
class Reading:
    """A part of a prompt is in the cache, and more is to be read. tokens: of the prompt_tokens that
    are there. Only progress: no trace has it."""

    tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class Prefilled:
    """The prompt is in the cache and the first token is there. text, reasoning: what is certain of
    the answer and of its reasoning so far. settings: all of them, resolved.
    backend: what runs the steps. left_out: how many messages of the conversation's beginning the
    context has no room for; backbone: what the heads sit on, where that is not the checkpoint.
    notes: what else was done to the conversation, a sentence each. logprobs: of token_ids, where
    they were asked for; no trace has them."""

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
    `seconds` that proposing the draft took; backbone_seconds: the part of the backbone's pass, LM
    head included, and of the draft too where both are one recording (then heads_seconds is 0);
    nodes: of the draft, 1 for plain decoding. draft: None when details were not asked for. budget:
    why so many nodes, "all" or in words (draft_budget.py). busy_seconds: see Stats.
    logprobs: see Prefilled.
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
class Finished:
    """The end. token_ids: everything generated, without the end token.

    prefilled.text + every step.text + tail = text, and so with reasoning, whose tail is what is
    left of it. message: why, when reason is "error".
    """

    reason: Reason
    token_ids: tuple[int, ...]
    text: str
    tail: str
    stats: Stats
    message: str = ""
    reasoning: str = ""


Event = Prefilled | Step | Finished
Told = Event | Reading
