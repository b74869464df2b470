"""`medusa-chat generate`: answers prompts from the command line or files."""

import json
import sys
from collections.abc import Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from typer import Option

from medusa_chat.cli.options import (
    DraftOptions,
    count,
    file_path,
    flag,
    refuse_unknown_tree,
    value,
    values_of,
)
from medusa_chat.cli.terminal import answer, note, open_trace, require_writable, show_load
from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest, Message, Prompt, without_broken_characters
from medusa_chat.runtime.presets import Preset, find_preset
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.runner import InProcess

ROLES = ("system", "user", "assistant")
MAX_FILE_BYTES = 10_000_000


@dataclass(frozen=True)
class PromptOptions:
    """The prompts, and the form of the output."""

    prompt: Annotated[str | None, value("TEXT", "The prompt.")] = None
    prompt_file: Annotated[
        Path | None, file_path("UTF-8 file with the prompt; - for standard input.")
    ] = None
    messages: Annotated[
        Path | None, file_path('Conversation: [{"role": ..., "content": ...}].')
    ] = None
    prompts: Annotated[
        Path | None, file_path('JSONL: one {"prompt"} or {"messages"} per line.')
    ] = None
    raw: Annotated[bool, flag("--raw", "Use no chat template: prompts are continued.")] = False
    as_json: Annotated[bool, flag("--json", "Print one JSON event per line.")] = False
    trace: Annotated[Path | None, file_path("Also write the events here.")] = None


@dataclass(frozen=True)
class DecodingOptions(DraftOptions):
    """Options of a command that generates: the fields of GenerationSettings, which checks them,
    a preset under them, and --verbose."""

    preset: Annotated[
        str | None, value("NAME|FILE.toml", "Settings and system prompt; options go before it.")
    ] = None
    drafter: Annotated[
        str | None,
        value(
            "|".join(kinds.NAMES),
            "What drafts; auto: the heads or the draft model, if any, and prompt lookup.",
        ),
    ] = None
    acceptance: Annotated[
        str | None,
        value(
            "exact|typical|typical-sampled",
            "Acceptance rule: exact (the default) is lossless, the typical ones are lossy.",
        ),
    ] = None
    temperature: Annotated[float | None, Option(help="0 to 2; 0, the default: greedy.")] = None
    top_p: Annotated[float | None, Option(help="0 to 1; 1: off.")] = None
    top_k: Annotated[int | None, Option(help="0: off.")] = None
    min_p: Annotated[
        float | None, Option(help="0 to 1, relative to the most probable token; 0: off.")
    ] = None
    repetition_penalty: Annotated[
        float | None, Option(help="0.1 to 10: divides the logits of tokens in the text; 1: off.")
    ] = None
    presence_penalty: Annotated[
        float | None, Option(help="-2 to 2: off the logits of tokens in the answer.")
    ] = None
    frequency_penalty: Annotated[
        float | None, Option(help="-2 to 2: the same, times how often they are in it.")
    ] = None
    posterior_threshold: Annotated[
        float | None, Option(help="Epsilon of typical acceptance; default 0.09.")
    ] = None
    posterior_alpha: Annotated[
        float | None, Option(help="Delta of typical acceptance: below 1; default 0.3.")
    ] = None
    tree: Annotated[str | None, value("auto|NAME|FILE", "Draft tree: a preset or a file.")] = None
    nodes: Annotated[int | None, count("Cut the tree to N nodes, including the root.")] = None
    max_new_tokens: Annotated[int | None, count("Maximum length of the answer; default 512.")] = (
        None
    )
    seed: Annotated[int | None, count("Default: random.")] = None
    stop: Annotated[list[str] | None, value("TEXT", "Stop before this text; repeatable.")] = None
    verbose: Annotated[
        bool, flag("--verbose", "Print how the model was loaded and how it drafts.")
    ] = False

    def load_request(self) -> LoadRequest:
        """The request to load the model for answers with this tree only. Raises UsageError."""
        request = super().load_request()
        settings = self.settings()
        return replace(request, tree=settings.tree, nodes=settings.nodes)

    @cached_property
    def chosen(self) -> Preset | None:
        """The preset that was asked for. Raises UsageError."""
        return find_preset(self.preset) if self.preset is not None else None

    def settings(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> GenerationSettings:
        """The settings of every answer: options, then the preset's, then `defaults`. Raises
        UsageError."""
        given = {
            name: tuple(value) if name == "stop" else value
            for name, value in values_of(GenerationSettings, self).items()
            if value is not None
        }
        under = {**defaults, **(self.chosen.settings if self.chosen else {})}
        try:
            settings = GenerationSettings.from_json({**under, **given})
        except UsageError as error:
            name, _, rest = str(error).partition(" ")
            option = f"--{name.replace('_', '-')}" if name in given else name
            raise UsageError(f"{option} {rest}") from None
        refuse_unknown_tree(settings.tree, settings.nodes)
        return settings


@dataclass(frozen=True)
class Generate(DecodingOptions, PromptOptions):
    """Answer one or more prompts in turn."""

    def run(self) -> None:
        """Check the options, load the model in this process, print the answers."""
        request = self.load_request()
        settings = self.settings()
        texts = read_prompts(self.prompt, self.prompt_file, self.messages, self.prompts)
        prompts = [self._with_system(as_conversation(text, self.raw)) for text in texts]
        if self.trace is not None:
            require_writable(self.trace, self.prompt_file, self.messages, self.prompts)
        with open_trace(self.trace) as file, closing(InProcess()) as runner:
            show_load(runner.run(request), self.verbose)
            with suppress(OSError):  # pipes and devices cannot be truncated
                file and file.truncate(0)
            for number, prompt in enumerate(prompts, start=1):
                try:
                    asked = Reply(prompt, settings)
                    _, is_stopped = answer(runner, asked, self.as_json, file, self.verbose)
                except UsageError as error:
                    where = f"prompt {number} of {len(prompts)}: " if len(prompts) > 1 else ""
                    raise type(error)(f"{where}{error}") from None
                if is_stopped:
                    raise KeyboardInterrupt

    def _with_system(self, prompt: Prompt) -> Prompt:
        """A conversation behind the preset's system prompt, unless it has one. Raises UsageError
        for a raw text, which has no place for it."""
        if self.chosen is None or not self.chosen.system:
            return prompt
        if not isinstance(prompt, list):
            raise UsageError(
                f"--raw takes no system prompt, and preset {self.chosen.name} has one: omit one "
                "of them"
            )
        return self.chosen.before(prompt)


# ---- prompts: checked and cleaned before any model is loaded ----


def read_prompts(
    prompt: str | None, prompt_file: Path | None, messages: Path | None, prompts: Path | None
) -> list[Prompt]:
    """Texts or conversations, from the one source that is given. Raises UsageError."""
    sources = {
        "--prompt": prompt,
        "--prompt-file": prompt_file,
        "--messages": messages,
        "--prompts": prompts,
    }
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise UsageError(f"give exactly one of {', '.join(sources)}; got {got}")
    if prompt is not None:
        return [clean_text(prompt, "--prompt")]
    if prompt_file is not None:
        text = read_file(prompt_file).removesuffix("\n")  # like the shell's $(...)
        is_stdin = str(prompt_file) == "-"
        return [clean_text(text, "standard input" if is_stdin else str(prompt_file))]
    if messages is not None:
        return [conversation(parse_json(read_file(messages), str(messages)), str(messages))]
    assert prompts is not None
    return read_rows(prompts)


def read_rows(file: Path) -> list[Prompt]:
    """The prompts in a JSONL file: {"prompt": text} or {"messages": [...]} on each line."""
    rows: list[Prompt] = []
    for number, line in enumerate(read_file(file).split("\n"), start=1):
        where = f"{file} line {number}"
        if not line.strip():
            continue
        row = parse_json(line, where)
        if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
            raise UsageError(f'{where}: give {{"prompt": text}} or {{"messages": [...]}}')
        if "messages" in row:
            rows.append(conversation(row["messages"], where))
        elif isinstance(row["prompt"], str):
            rows.append(clean_text(row["prompt"], where))
        else:
            raise UsageError(f"{where}: prompt must be a string")
    if not rows:
        raise UsageError(f"{file} has no prompts: write one per line")
    return rows


def read_file(file: Path) -> str:
    """UTF-8 text of at most MAX_FILE_BYTES, with \\n as line ends and no byte order mark; "-" is
    standard input. Raises UsageError."""
    try:
        with nullcontext(sys.stdin.buffer) if str(file) == "-" else open(file, "rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file} is not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read {file}: {reason}") from None
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{file} is larger than {MAX_FILE_BYTES // 1_000_000} MB: split it")
    return text.replace("\r\n", "\n")


def parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}") from None


def conversation(value: Any, where: str) -> list[Message]:
    """Checked messages {"role", "content"}, the last one from the user. Raises UsageError."""
    if not isinstance(value, list) or not value:
        raise UsageError(f'{where}: give a list of {{"role": ..., "content": ...}}')
    for position, entry in enumerate(value, start=1):
        if problem := _message_problem(entry):
            raise UsageError(f"{where}, message {position}: {problem}")
    if value[-1]["role"] != "user":
        raise UsageError(f"{where}, message {len(value)}: the last message must have the role user")
    last = f"{where}, message {len(value)}"
    head = [{**entry, "content": _repaired(entry["content"])} for entry in value]
    return [*head[:-1], {"role": "user", "content": clean_text(head[-1]["content"], last)}]


def _message_problem(entry: Any) -> str:
    if not isinstance(entry, dict) or set(entry) != {"role", "content"}:
        return 'give exactly {"role": ..., "content": ...}'
    if entry["role"] not in ROLES:
        return f"role is {entry['role']!r}: choose one of {', '.join(ROLES)}"
    return "" if isinstance(entry["content"], str) else "content must be a string"


def clean_text(text: str, where: str) -> str:
    """A prompt that any tokenizer accepts. Raises UsageError if it is empty."""
    text = _repaired(text)
    if not text.strip():
        raise UsageError(f"{where} is empty: write a prompt")
    return text


def _repaired(text: str) -> str:
    """`without_broken_characters`, with a note on stderr about what changed."""
    repaired = without_broken_characters(text)
    if broken := repaired.count("\ufffd") - text.count("\ufffd"):
        note(f"note: replaced {broken} broken characters in the prompt with U+FFFD")
    if nulls := text.count("\0"):
        note(f"note: removed {nulls} null bytes from the prompt")
    return repaired


def as_conversation(prompt: Prompt, raw: bool) -> Prompt:
    """A text as a conversation of one message; unchanged if raw."""
    if raw and not isinstance(prompt, str):
        raise UsageError('--raw takes text, not messages: omit --raw, or give {"prompt": text}')
    return prompt if raw or not isinstance(prompt, str) else [{"role": "user", "content": prompt}]
