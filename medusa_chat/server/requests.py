"""ApiRequest: what a client of the OpenAI API asks, checked, as replies to ask of the session."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import (
    Message,
    ModelInfo,
    Prompt,
    TokenIds,
    without_broken_characters,
)
from medusa_chat.runtime.presets import Preset, load_preset, preset_names
from medusa_chat.runtime.requests import Reply

TEMPERATURE = 1.0  # as OpenAI's server has it, where nothing names one
MAX_STOPS = 64  # OpenAI allows 4; editors send longer lists
MAX_PROMPTS = 64  # of one request
MAX_LOGPROBS = 20
MAX_TOKENS = 1_000_000  # more than any context: the context ends the answer
SEEDS = 2**63
NO_PRESET = Preset("none")
ROLES = ("system", "developer", "user", "assistant", "tool")
UNSUPPORTED = {  # fields that would change the answer, and what else to do
    "logit_bias": "it is not supported: leave it out",
    "suffix": "filling in the middle is not supported: leave it out",
    "echo": "it is not supported: leave it out",
    "functions": "function calls are not supported: leave it out",
}


class ApiError(Exception):
    """An answer that is an error. status: of HTTP; code, param: as OpenAI's errors have them."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def to_json(self) -> dict[str, Any]:
        """The body that clients read."""
        kinds = {401: "authentication_error", 429: "rate_limit_exceeded"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        fields = {"message": self.message, "param": self.param, "code": self.code}
        return {"error": {"type": kinds.get(self.status, kind), **fields}}


@dataclass(frozen=True)
class ApiRequest:
    """One request. replies: what to ask of the model, one for each choice.

    logprobs: how many alternatives each token comes with; None without log probabilities.
    includes_usage: whether a stream ends with a chunk of usage. preset: the name of the one that
    the request named behind its model ("name@preset"); empty for none.
    """

    replies: tuple[Reply, ...]
    is_chat: bool
    is_streamed: bool
    includes_usage: bool
    logprobs: int | None
    preset: str = ""

    @classmethod
    def of_chat(cls, body: bytes, model: ModelInfo) -> "ApiRequest":
        """The body of /v1/chat/completions. Raises ApiError."""
        fields = _Fields(body)
        preset = _preset(fields, model.name)
        messages = preset.before(_messages(fields))
        if fields.flag("logprobs"):
            logprobs = fields.number("top_logprobs", 0, MAX_LOGPROBS) or 0
        else:
            logprobs = None
        most = fields.number("max_completion_tokens", 1, MAX_TOKENS)
        _refuse_tools(fields)
        reply = Reply(
            messages,
            _settings(fields, most or fields.number("max_tokens", 1, MAX_TOKENS), model, preset),
            continues=fields.flag("continue_final_message"),
            template_options=_template_options(fields),
            logprobs=logprobs,
        )
        return cls((reply,), True, *_streaming(fields), logprobs, _shown_name(preset))

    @classmethod
    def of_completion(cls, body: bytes, model: ModelInfo) -> "ApiRequest":
        """The body of /v1/completions. A preset's system prompt has no place in it. Raises
        ApiError."""
        fields = _Fields(body)
        preset = _preset(fields, model.name)
        logprobs = fields.number("logprobs", 0, MAX_LOGPROBS)
        settings = _settings(fields, fields.number("max_tokens", 1, MAX_TOKENS), model, preset)
        replies = tuple(Reply(prompt, settings, logprobs=logprobs) for prompt in _prompts(fields))
        return cls(replies, False, *_streaming(fields), logprobs, _shown_name(preset))


class _Fields:
    """The fields of a request; null is the same as a field that is missing, others are ignored."""

    def __init__(self, body: bytes) -> None:
        try:
            values = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the request's body is not valid JSON ({error})") from None
        if not isinstance(values, dict):
            raise ApiError(400, "the request's body must be a JSON object")
        self._values = {name: value for name, value in values.items() if value is not None}

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def refuse(self, name: str, wanted: str) -> NoReturn:
        raise _invalid(name, f"is {_shown(self._values.get(name))}: {wanted}")

    def flag(self, name: str) -> bool:
        value = self._values.get(name, False)
        if not isinstance(value, bool):
            self.refuse(name, "give true or false")
        return value

    def number(self, name: str, low: int, high: int) -> int | None:
        """A whole number; None where there is none."""
        value = self._values.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (type(value) is not int or not low <= value <= high):
            self.refuse(name, f"give a whole number from {low} to {high}")
        return value

    def share(self, name: str, high: float = 1.0, low: float = 0.0) -> float | None:
        """A number from `low` to `high`; None where there is none."""
        value = self._values.get(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            self.refuse(name, f"give a number from {low:g} to {high:g}")
        return float(value)

    def object(self, name: str) -> Mapping[str, Any]:
        value = self._values.get(name, {})
        if not isinstance(value, dict):
            self.refuse(name, "give an object")
        return value


def _preset(fields: _Fields, model: str) -> Preset:
    """The preset behind the model's name; one that sets nothing where none is named. Raises
    ApiError for one that there is not, unless another server's name may have the "@"."""
    asked = fields.get("model")
    name, _, preset = asked.rpartition("@") if isinstance(asked, str) else ("", "", "")
    is_known = preset in preset_names()
    if not is_known and "@" in str(asked) and name in ("", model):
        raise ApiError(
            404,
            f"there is no preset {preset!r:.80}: ask for one of {', '.join(preset_names())}",
            code="model_not_found",
            param="model",
        )
    try:
        return load_preset(preset) if is_known else NO_PRESET
    except UsageError as error:
        raise ApiError(400, str(error), param="model") from None


def _shown_name(preset: Preset) -> str:
    return "" if preset is NO_PRESET else preset.name


def _settings(
    fields: _Fields, most: int | None, model: ModelInfo, preset: Preset
) -> GenerationSettings:
    """The request's settings; for what it leaves out the preset's, then the model's own."""
    for name, why in UNSUPPORTED.items():
        if fields.get(name):
            fields.refuse(name, why)
    if fields.number("n", 1, 128) not in (None, 1):
        fields.refuse("n", "one answer at a time is given: send 1, or ask again")
    seed, top_k = fields.get("seed"), fields.number("top_k", -1, 1_000_000)
    if seed is not None and type(seed) is not int:
        fields.refuse("seed", "give a whole number")
    asked = {
        "drafter": fields.get("drafter"),  # of ours, for who compares: "none" is plain decoding
        "temperature": fields.share("temperature", 2.0),
        "top_p": fields.share("top_p"),
        "top_k": None if top_k is None else max(0, top_k),  # -1 is vLLM's "off"
        "min_p": fields.share("min_p"),
        "repetition_penalty": fields.share("repetition_penalty", 10.0, 0.1),
        "presence_penalty": fields.share("presence_penalty", 2.0, -2.0),
        "frequency_penalty": fields.share("frequency_penalty", 2.0, -2.0),
        "max_new_tokens": most,
        "seed": None if seed is None else seed % SEEDS,
        "stop": None if fields.get("stop") is None else _stops(fields),
    }
    given = {name: value for name, value in asked.items() if value is not None}
    under = {"temperature": TEMPERATURE, "max_new_tokens": MAX_TOKENS}
    try:
        return GenerationSettings.from_json({**under, **model.sampling, **preset.settings, **given})
    except UsageError as error:
        raise ApiError(400, str(error)) from None


def _stops(fields: _Fields) -> tuple[str, ...]:
    stops = fields.get("stop")
    listed = [stops] if isinstance(stops, str) else stops or []
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        fields.refuse("stop", "give a text or a list of texts")
    if len(listed) > MAX_STOPS:
        fields.refuse("stop", f"give at most {MAX_STOPS} texts")
    return tuple(dict.fromkeys(text for text in listed if text))


def _streaming(fields: _Fields) -> tuple[bool, bool]:
    is_streamed = fields.flag("stream")
    return is_streamed, is_streamed and bool(fields.object("stream_options").get("include_usage"))


def _messages(fields: _Fields) -> list[Message]:
    listed = fields.get("messages")
    if not isinstance(listed, list) or not listed:
        fields.refuse("messages", "give a list of messages")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(listed)]


def _message(message: object, place: str) -> Message:
    if not isinstance(message, dict):
        raise _invalid(place, f"is {_shown(message)}: give an object")
    role = message.get("role")
    if role not in ROLES:
        raise _invalid(f"{place}.role", f"is {_shown(role)}: give one of {', '.join(ROLES)}")
    made = {"role": "system" if role == "developer" else role}
    made["content"] = _content(message.get("content"), f"{place}.content")
    reasoning = message.get("reasoning_content")
    if role == "assistant" and isinstance(reasoning, str) and reasoning:
        made["reasoning"] = without_broken_characters(reasoning)
    return made


def _content(content: object, place: str) -> str:
    """The text of a message: a string, or the text parts of a list."""
    parts = [content] if isinstance(content, str) else content
    if parts is None:
        return ""
    if not isinstance(parts, list):
        raise _invalid(place, f"is {_shown(content)}: give a text or a list of parts")
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if kind in ("text", "input_text") else part
        if isinstance(part, dict) and kind not in ("text", "input_text"):
            raise _invalid(place, f"has a part of type {_shown(kind)}: this model reads text only")
        if not isinstance(text, str):
            raise _invalid(place, f"has {_shown(text)}: give parts with a text")
        texts.append(text)
    return without_broken_characters("".join(texts))


def _refuse_tools(fields: _Fields) -> None:
    """Tools may be offered, and are not used; a client that insists is told."""
    choice, form = fields.get("tool_choice"), fields.object("response_format").get("type")
    if choice not in (None, "auto", "none"):
        fields.refuse("tool_choice", "tool calls are not supported: send auto or none")
    if form not in (None, "text"):
        raise _invalid("response_format", f"is {_shown(form)}: only text is supported")


def _template_options(fields: _Fields) -> dict[str, Any]:
    """What the chat template is told besides the messages."""
    options = dict(fields.object("chat_template_kwargs"))
    effort = fields.get("reasoning_effort")
    if effort is not None:
        options.setdefault("reasoning_effort", effort)
    return options


def _prompts(fields: _Fields) -> list[Prompt]:
    """The prompts of a completion: texts, or lists of token ids."""
    asked = fields.get("prompt")
    is_one = isinstance(asked, str) or (isinstance(asked, list) and _are_ids(asked))
    listed = [asked] if is_one else asked
    if not isinstance(listed, list) or not listed or len(listed) > MAX_PROMPTS:
        fields.refuse("prompt", f"give a text, token ids, or 1 to {MAX_PROMPTS} of these")
    prompts: list[Prompt] = []
    for prompt in listed:
        if isinstance(prompt, str):
            prompts.append(without_broken_characters(prompt))
        elif isinstance(prompt, list) and _are_ids(prompt):
            prompts.append(TokenIds(tuple(prompt)))
        else:
            fields.refuse("prompt", "give a text or a list of token ids")
    return prompts


def _are_ids(values: Sequence[object]) -> bool:
    return bool(values) and all(type(value) is int and value >= 0 for value in values)


def _invalid(name: str, what: str) -> ApiError:
    return ApiError(400, f"{name} {what}", param=name)


def _shown(value: object) -> str:
    """A value in a message, short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
