"""`medusa-chat generate`: answers prompts from the command line or files."""

import json
import sys
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from medusa_chat.cli.options import (
    DraftOptions,
    TreeName,
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
    and --verbose."""

    drafter: Annotated[
        str | None,
        value(
            "|".join(kinds.NAMES),
            "What drafts; auto: the heads or the draft model, if any, and prompt lookup.",
        ),
    ] = None
    acceptance: Annotated[
        str,
        value(
            "exact|typical|typical-sampled",
            "Acceptance rule: exact is lossless, the typical ones are lossy.",
        ),
    ] = "exact"
    temperature: Annotated[float, Option(help="0 to 2; 0: greedy.")] = 0.0
    top_p: Annotated[float, Option(help="0 to 1; 1: off.")] = 1.0
    top_k: Annotated[int, Option(help="0: off.")] = 0
    min_p: Annotated[float, Option(help="0 to 1, relative to the most probable token; 0: off.")] = (
        0.0
    )
    repetition_penalty: Annotated[
        float, Option(help="0.1 to 10: divides the logits of tokens in the text; 1: off.")
    ] = 1.0
    presence_penalty: Annotated[
        float, Option(help="-2 to 2: off the logits of tokens in the answer.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Option(help="-2 to 2: the same, times how often they are in it.")
    ] = 0.0
    posterior_threshold: Annotated[float, Option(help="Epsilon of typical acceptance.")] = 0.09
    posterior_alpha: Annotated[float, Option(help="Delta of typical acceptance: below 1.")] = 0.3
    tree: TreeName = "auto"
    nodes: Annotated[int | None, count("Cut the tree to N nodes, including the root.")] = None
    max_new_tokens: Annotated[int, count("Maximum length of the answer.")] = 512
    seed: Annotated[int | None, count("Default: random.")] = None
    stop: Annotated[list[str] | None, value("TEXT", "Stop before this text; repeatable.")] = None
    verbose: Annotated[
        bool, flag("--verbose", "Print how the model was loaded and how it drafts.")
    ] = False

    def load_request(self) -> LoadRequest:
        """The request to load the model for answers with this tree only. Raises UsageError."""
        return replace(super().load_request(), tree=self.tree, nodes=self.nodes)

    def settings(self) -> GenerationSettings:
        """The settings of every answer. Raises UsageError."""
        values = values_of(GenerationSettings, self)
        try:
            settings = GenerationSettings(**values | {"stop": tuple(self.stop or ())})
        except UsageError as error:
            name, _, rest = str(error).partition(" ")
            option = f"--{name.replace('_', '-')}" if name in values else name
            raise UsageError(f"{option} {rest}") from None
        refuse_unknown_tree(self.tree, self.nodes)
        return settings


@dataclass(frozen=True)
class Generate(DecodingOptions, PromptOptions):
    """Answer one or more prompts in turn."""

    def run(self) -> None:
        """Check the options, load the model in this process, print the answers."""
        request = self.load_request()
        settings = self.settings()
        texts = read_prompts(self.prompt, self.prompt_file, self.messages, self.prompts)
        prompts = [as_conversation(text, self.raw) for text in texts]
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
