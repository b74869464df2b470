"""Choice: one answer as OpenAI's API tells it, whole or in chunks, with its figures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from medusa_chat.decoding.events import Event, Finished, Prefilled, Reason, Step, TokenLogprob
from medusa_chat.server.requests import ApiError

FINISH: dict[Reason, str] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "context": "length",
    "cancelled": "stop",
}
LEAST_LOGPROB = -9999.0  # for minus infinity, which JSON has not


@dataclass
class Choice:
    """One answer while it runs. Feed it every event; it gives what is new, and at the end all.

    Raises ApiError for an answer that ended in an error.
    """

    index: int
    is_chat: bool
    has_logprobs: bool
    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0  # that the answer has, without an end token
    steps: int = 0
    emitted: int = 0  # tokens that the steps gave, an end token included
    accepted: list[int] = field(default_factory=list)  # steps that accepted the k-th node
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, event: Event) -> Iterator[dict[str, Any]]:
        """The chunks' choices that an event gives."""
        match event:
            case Prefilled():
                self.prompt_tokens = event.prompt_tokens
                self.cached_tokens = event.reused_tokens
                if self.is_chat:
                    yield self._chunk({"role": "assistant", "content": ""})
                yield from self._part(event.text, event.reasoning, event.logprobs)
            case Step():
                self._count(event)
                yield from self._part(event.text, event.reasoning, event.logprobs)
            case Finished():
                if event.reason == "error":
                    raise ApiError(500, event.message or "the answer ended in an error")
                self.tokens, self.emitted = len(event.token_ids), event.stats.emitted
                yield from self._part(event.tail, event.reasoning[len(self.reasoning) :], ())
                self.finish = FINISH[event.reason]
                yield self._chunk({})

    def _count(self, step: Step) -> None:
        self.steps += 1
        deep = len(step.path) - 1  # nodes after the root
        self.accepted += [0] * (deep - len(self.accepted))
        for depth in range(deep):
            self.accepted[depth] += 1

    def _part(
        self, text: str, reasoning: str, logprobs: Sequence[TokenLogprob]
    ) -> Iterator[dict[str, Any]]:
        self.text += text
        self.reasoning += reasoning
        before = len(self.logprobs)
        self.logprobs += logprobs
        if not (text or reasoning or logprobs):
            return
        delta = {"reasoning_content": reasoning} if reasoning else {}
        if text or not reasoning:
            delta["content"] = text
        yield self._chunk(delta, before if logprobs else None)

    def _chunk(self, delta: dict[str, str], first: int | None = None) -> dict[str, Any]:
        """first: of the tokens whose log probabilities are in this chunk; None for none."""
        told = None if first is None else self._logprobs(first)
        if self.is_chat:
            content: dict[str, Any] = {"delta": delta}
        else:
            content = {"text": delta.get("content", "")}
        return {"index": self.index, **content, "logprobs": told, "finish_reason": self.finish}

    def to_json(self) -> dict[str, Any]:
        """The whole choice of an answer that is not streamed."""
        told = self._logprobs(0) if self.has_logprobs else None
        if self.is_chat:
            message = {"role": "assistant", "content": self.text, "refusal": None}
            if self.reasoning:
                message["reasoning_content"] = self.reasoning
            content: dict[str, Any] = {"message": message}
        else:
            content = {"text": self.text}
        return {"index": self.index, **content, "logprobs": told, "finish_reason": self.finish}

    def _logprobs(self, first: int) -> dict[str, Any]:
        tokens = self.logprobs[first:]
        if self.is_chat:
            return {"content": [_told(token) for token in tokens], "refusal": None}
        return {
            "tokens": [_text(token.text) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {_text(text): _finite(logprob) for text, logprob in token.top} for token in tokens
            ],
            "text_offset": self._offsets()[first:],
        }

    def _offsets(self) -> list[int]:
        """Where each token's text begins in the choice's."""
        lengths = (len(token.text.decode("utf-8", "replace")) for token in self.logprobs)
        return list(accumulate(lengths, initial=0))[:-1]


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """The figures of a request. medusa: what drafting did, which other servers do not tell.

    accepted_by_depth[k]: the share of steps that accepted a drafted token at depth k + 1.
    """
    prompt = sum(choice.prompt_tokens for choice in choices)
    written = sum(choice.tokens for choice in choices)
    steps = sum(choice.steps for choice in choices)
    emitted = sum(choice.emitted for choice in choices)
    depth = max((len(choice.accepted) for choice in choices), default=0)
    by_depth = [sum(c.accepted[k] for c in choices if k < len(c.accepted)) for k in range(depth)]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in choices)},
        "medusa": {
            "steps": steps,
            "tokens_per_step": round(emitted / steps, 3) if steps else None,
            "accepted_by_depth": [round(count / steps, 3) for count in by_depth],
        },
    }


def _told(token: TokenLogprob) -> dict[str, Any]:
    top = [{**_named(text), "logprob": _finite(logprob)} for text, logprob in token.top]
    return {**_named(token.text), "logprob": _finite(token.logprob), "top_logprobs": top}


def _named(piece: bytes) -> dict[str, Any]:
    return {"token": _text(piece), "bytes": list(piece)}


def _text(piece: bytes) -> str:
    """A token as a text; one that is a part of a character by its bytes, as OpenAI names it."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
