"""AnswerTokens: the tokens of an answer as steps bring them, up to where it ends."""

from collections.abc import Sequence

from medusa_chat.decoding.events import Finished, Reason, Stats, Step
from medusa_chat.decoding.step_result import StepResult

BROKEN = (
    "the model produced invalid numbers (NaN or infinity): try --precision fp32, or check its "
    "weights"
)


class AnswerTokens:
    """What was emitted so far. reason: why the answer has ended; None while it goes on.

    eos: ids that end it, which are not emitted; limit: the most tokens, at which it ends for the
    reason `at_limit`.
    """

    def __init__(self, eos: frozenset[int], limit: int, at_limit: Reason) -> None:
        self.eos, self.limit, self.at_limit = eos, limit, at_limit
        self.ids: list[int] = []
        self.reason: Reason | None = None
        self.prefill_seconds = 0.0
        self._steps, self._emitted, self._seconds = 0, 0, 0.0

    @property
    def room(self) -> int:
        """The number of tokens that may still be added."""
        return self.limit - len(self.ids)

    def begin(self, result: StepResult, seconds: float) -> tuple[int, ...]:
        """The prompt was read in `seconds`; returns what is emitted of its first token."""
        self.prefill_seconds = seconds
        return tuple(self._add([result.next_token], result))

    def step(self, tokens: Sequence[int], result: StepResult, seconds: float, why: str) -> Step:
        """The event of a step that brought `tokens`. why: it drafted so many nodes."""
        fresh = self._add(tokens, result)
        count = len(fresh) + (self.reason == "eos")
        index = self._steps
        self._steps, self._emitted = index + 1, self._emitted + count
        self._seconds += seconds
        return Step(
            index,
            tuple(fresh),
            "",
            seconds,
            tuple(result.path[: count + 1]),
            result.record,
            result.heads_seconds,
            result.backbone_seconds,
            result.nodes,
            why,
        )

    def finished(self) -> Finished:
        """The last event. It has ended."""
        assert self.reason is not None
        timing = (self._steps, self._emitted, self._seconds, self.prefill_seconds)
        return Finished(
            reason=self.reason,
            token_ids=tuple(self.ids),
            text="",
            tail="",
            stats=Stats.of(len(self.ids), *timing),
            message=BROKEN if self.reason == "error" else "",
        )

    def _add(self, tokens: Sequence[int], result: StepResult) -> list[int]:
        """Those of the tokens that are emitted."""
        if not result.is_finite:
            self.reason = "error"
            return []
        fresh: list[int] = []
        for token in tokens:
            if token in self.eos:
                self.reason = "eos"
                break
            fresh.append(token)
            if len(fresh) >= self.room:
                self.reason = self.at_limit
                break
        self.ids += fresh
        return fresh
