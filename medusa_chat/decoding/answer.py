"""Answer: the tokens, text and figures of an answer so far, and why it ended."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import get_clock_info, perf_counter, thread_time

import torch

from medusa_chat.decoding.acceptance import TORCH, Rows
from medusa_chat.decoding.detokenizer import TextStream, TokenTexts
from medusa_chat.decoding.events import DraftRecord, Finished, Reason, Stats, Step, TokenLogprob
from medusa_chat.decoding.reasoning import Part, ReasoningReader
from medusa_chat.decoding.step import StepResult

BROKEN = (
    "the model produced invalid numbers (NaN or infinity): try --precision fp32, or check its "
    "weights"
)
FINE = 1e-6  # seconds: a coarser clock of processor time cannot time a step


class Answer:
    """An answer while it is generated. reason: why it has ended; None while it continues.

    eos: ids that end it and are not emitted. limit: the most tokens, at which it ends for the
    reason `at_limit`. stop: texts that end it at the token that completes one. texts: of tokens;
    None: events have no text, and no text ends it. logprobs: see Engine.generate;
    rows: reads the logits for them. reader: of reasoning; None: everything is text.
    """

    def __init__(
        self,
        eos: frozenset[int],
        limit: int,
        at_limit: Reason,
        texts: TokenTexts | None,
        stop: Sequence[str],
        reader: ReasoningReader | None = None,
        logprobs: int | None = None,
        rows: Rows = TORCH,
    ) -> None:
        self.eos, self.limit, self.at_limit = eos, limit, at_limit
        self.ids: list[int] = []
        self.part = Part()  # its reasoning and text
        self.reason: Reason | None = None
        self.prefill_seconds = 0.0
        self._texts, self._reader, self._alternatives = texts, reader, logprobs
        self._rows = rows
        self._stream = None if texts is None else TextStream(texts, stop)
        self._steps, self._emitted, self._seconds, self._busy = 0, 0, 0.0, 0.0

    @property
    def room(self) -> int:
        """The number of tokens that may still be added."""
        return self.limit - len(self.ids)

    def begin(
        self, result: StepResult, seconds: float, begun: Sequence[int] = ()
    ) -> tuple[tuple[int, ...], Part]:
        """Record that the prompt was read in `seconds` -> what is emitted of the first token, with
        the text of the tokens in the prompt that begin the answer."""
        self.prefill_seconds = seconds
        before = Part()
        for token in begun:
            before = before.plus(self._part_of(token))
        self.part = before
        ids, part = self._add([result.next_token], result)
        return ids, before.plus(part)

    def step(
        self, tokens: Sequence[int], result: StepResult, seconds: float, busy: float, why: str
    ) -> Step:
        """The event of a step that gave `tokens`. busy: see Step. why: the reason for its number of
        nodes."""
        fresh, part = self._add(tokens, result)
        count = len(fresh) + (self.reason == "eos")
        index = self._steps
        self._steps, self._emitted = index + 1, self._emitted + count
        self._seconds, self._busy = self._seconds + seconds, self._busy + busy
        path = tuple(result.path[: count + 1])
        record = result.record and self._named(result.record, fresh[len(path) - 1 :])
        parts = result.heads_seconds, result.backbone_seconds, result.nodes
        return Step(
            index,
            fresh,
            part.text,
            seconds,
            path,
            record,
            *parts,
            why,
            busy,
            part.reasoning,
            self.logprobs(fresh, result),
        )

    def logprobs(self, tokens: Sequence[int], result: StepResult) -> tuple[TokenLogprob, ...]:
        """Log probabilities of the tokens that a step emitted; empty if they were not requested."""
        if self._alternatives is None or self._texts is None or result.logits is None:
            return ()
        name, given = self._texts.bytes_of, []
        count = min(self._alternatives, result.logits.shape[1])
        for token, node in zip(tokens, result.path, strict=False):
            row = result.logits[node : node + 1]
            values, places, sums = self._rows.best(row, count)
            pairs = zip(places[0].tolist(), (values[0] - sums).tolist(), strict=True)
            top = tuple((name(other), logprob) for other, logprob in pairs)
            given.append(TokenLogprob(name(token), float(row[0, token] - sums[0]), top))
        return tuple(given)

    def finished(self) -> Finished:
        """The last event, once the answer has ended."""
        assert self.reason is not None
        text = "" if self._stream is None else self._stream.tail()
        part = self._read(text).plus(self._reader.finish() if self._reader else Part())
        whole = self.part.plus(part)
        timing = (self._steps, self._emitted, self._seconds, self.prefill_seconds, self._busy)
        message = BROKEN if self.reason == "error" else ""
        stats = Stats.of(len(self.ids), *timing)
        texts = (whole.text, part.text, stats, message, whole.reasoning)
        return Finished(self.reason, tuple(self.ids), *texts)

    def _add(self, tokens: Sequence[int], result: StepResult) -> tuple[tuple[int, ...], Part]:
        """The tokens of a step that are emitted, up to the end of the answer, and their text."""
        if not result.is_finite:
            self.reason = "error"
            return (), Part()
        fresh, part = list[int](), Part()
        for token in tokens:
            if token in self.eos:
                self.reason = "eos"
                break
            fresh.append(token)
            part = part.plus(self._part_of(token))
            if self._stream is not None and self._stream.is_stopped:
                self.reason = "stop"
                break
            if len(fresh) >= self.room:
                self.reason = self.at_limit
                break
        self.ids += fresh
        self.part = self.part.plus(part)
        return tuple(fresh), part

    def _part_of(self, token: int) -> Part:
        """The text that a token adds. A reasoning marker ends a passage of text."""
        if self._stream is None:
            return Part()
        if self._reader is None or not self._reader.is_marker(token):
            return self._read(self._stream.push(token))
        return self._read(self._stream.tail()).plus(self._reader.mark(token))

    def _read(self, text: str) -> Part:
        return Part("", text) if self._reader is None else self._reader.push(text)

    def _named(self, record: DraftRecord, behind: Sequence[int]) -> DraftRecord:
        """The record with its texts. behind: the token that came after the path, if one did."""
        if self._texts is None:
            return record
        names = tuple(map(self._texts, record.tokens))
        return replace(record, texts=names, next_text="".join(map(self._texts, behind)))


def busy_clock(device: torch.device) -> Callable[[], float]:
    """A clock that excludes other programs: on a CPU this thread's own processor time, if the
    system measures it finely enough. Windows updates it every 16 ms, whatever it reports."""
    is_fine = sys.platform != "win32" and get_clock_info("thread_time").resolution <= FINE
    return thread_time if device.type == "cpu" and is_fine else perf_counter
