"""NativeRun: several steps in one call into C, and their results."""

from collections.abc import Iterator
from ctypes import addressof, byref, c_double, c_int64, pointer

from medusa_chat.decoding.backends.native.account import NativeAccount
from medusa_chat.decoding.backends.native.library import NativeThreads
from medusa_chat.decoding.backends.native.structs import Run, Step
from medusa_chat.decoding.backends.native.tree_shape import Shape
from medusa_chat.decoding.draft_budget import STRIDE
from medusa_chat.decoding.drafters import Plan
from medusa_chat.decoding.step_result import DecodeState, StepResult

MOST_STEPS = 64  # of one call
MOMENT = 0.002  # seconds after which a call begins no other step: too short to be noticed
HEADER = 4  # ids of a step before its path and the path's tokens


class NativeRun:
    """Runs the job `step` once, or again and again for up to MOMENT seconds."""

    def __init__(self, step: Step, team: NativeThreads) -> None:
        self._team, self._account = team, NativeAccount()
        self._account_at = pointer(self._account.job)
        self._job = Run(pointer(step), seconds=MOMENT)
        self._ids = (c_int64 * 0)()
        self._times = (c_double * (MOST_STEPS * 3))()
        self._job.times = addressof(self._times)
        self._ends_of: tuple[int, ...] | None = None
        self._call = byref(self._job)
        self.asked = 0  # heads that ran in the last step

    @property
    def seconds(self) -> float:
        """Seconds of the last call."""
        return float(self._job.whole)

    def turn_to(self, shape: Shape) -> None:
        """Prepare for steps of this tree."""
        job, most = self._job, shape.depth + 1
        job.rows, job.longest, job.stride = shape.nodes, most, HEADER + 2 * most
        if len(self._ids) < MOST_STEPS * job.stride:
            self._ids = (c_int64 * (MOST_STEPS * job.stride))()
            job.ids = addressof(self._ids)
        job.account = self._account_at if shape.growth is not None else None

    def decode_steps(
        self, plan: Plan, state: DecodeState, start: int, longest: int
    ) -> list[StepResult] | None:
        """Run steps after `start` tokens, none after more than `longest`; None for a token outside
        the vocabulary. The caller sets is_finite and certainty of the last result."""
        job = self._job
        if plan.grower is not None:  # its costs hold for STRIDE tokens
            longest = min(longest, start // STRIDE * STRIDE + STRIDE - 1)
            self._account.open(plan.grower, start, plan.asks)
        job.last_start, job.most_tokens = longest, state.most
        job.certainty, job.least = state.certainty, plan.least
        job.most_steps = MOST_STEPS if plan.is_lasting and not state.details else 1
        if state.ends is not self._ends_of:
            self._ends_of = state.ends
            self._ends = (c_int64 * len(state.ends))(*state.ends)
            job.ends, job.end_count = addressof(self._ends), len(state.ends)
        if self._team.steps(self._call):
            return None
        if plan.grower is not None:
            self._account.close(plan.grower)
        return list(self._outcomes())

    def _outcomes(self) -> Iterator[StepResult]:
        count, stride, longest = self._job.count, self._job.stride, self._job.longest
        ids, times = self._ids[: count * stride], self._times[: count * 3]
        for number in range(count):
            at, timed = number * stride, times[3 * number : 3 * number + 3]
            nodes, length, following, self.asked = ids[at : at + HEADER]
            first = at + HEADER + longest
            path, tokens = ids[at + HEADER : at + HEADER + length], ids[first : first + length]
            yield StepResult(path, tokens, following, True, nodes, None, *timed)
