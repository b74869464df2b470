"""`medusa-chat generate`: answers to prompts, on stdout as they come."""

from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from typer import Option

from medusa_chat.cli.options import (
    LoadOptions,
    TreeName,
    count,
    file_path,
    flag,
    refuse_unknown_tree,
    value,
    values_of,
)
from medusa_chat.cli.prompts import as_asked, read_prompts
from medusa_chat.cli.terminal import answer, opened, require_folder, show_load
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.runner import InProcess


@dataclass(frozen=True)
class PromptOptions:
    """What is answered, and how the answers are written."""

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
    raw: Annotated[bool, flag("--raw", "Use no chat template.")] = False
    as_json: Annotated[bool, flag("--json", "Print one JSON event per line.")] = False
    trace: Annotated[Path | None, file_path("Also write the events here.")] = None


@dataclass(frozen=True)
class DecodingOptions(LoadOptions):
    """Options of a command that answers: the fields of GenerationSettings, which checks them, and
    what is told of the model."""

    drafter: Annotated[
        str | None,
        value(
            "auto|medusa|prompt-lookup|none",
            "What proposes tokens; auto: the heads, if any, and the text itself.",
        ),
    ] = None
    acceptance: Annotated[
        str,
        value(
            "exact|typical|typical-sampled",
            "Acceptance rule: exact is lossless, typical ones are lossy.",
        ),
    ] = "exact"
    temperature: Annotated[float, Option(help="0 to 2; 0: greedy.")] = 0.0
    top_p: Annotated[float, Option(help="0 to 1; 1: off.")] = 1.0
    top_k: Annotated[int, Option(help="0: off.")] = 0
    min_p: Annotated[float, Option(help="0 to 1, of the highest probability; 0: off.")] = 0.0
    posterior_threshold: Annotated[float, Option(help="Epsilon of typical acceptance.")] = 0.09
    posterior_alpha: Annotated[float, Option(help="Delta of typical acceptance: below 1.")] = 0.3
    tree: TreeName = "auto"
    nodes: Annotated[int | None, count("Cut the tree to N nodes, root included.")] = None
    max_new_tokens: Annotated[int, count("Maximum length of the answer.")] = 512
    seed: Annotated[int | None, count("Default: random.")] = None
    stop: Annotated[
        list[str] | None, value("TEXT", "End the answer before this text; repeatable.")
    ] = None
    verbose: Annotated[
        bool, flag("--verbose", "Report how the model was loaded and what drafts.")
    ] = False

    def load_request(self) -> LoadRequest:
        """The request to load the model for these answers alone. Raises UsageError."""
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
        """Check the options, load the model in this process, and print the answers."""
        request = self.load_request()
        settings = self.settings()
        given = read_prompts(self.prompt, self.prompt_file, self.messages, self.prompts)
        prompts = [as_asked(prompt, self.raw) for prompt in given]
        if self.trace is not None:
            require_folder(self.trace, self.prompt_file, self.messages, self.prompts)
        with opened(self.trace) as file, closing(InProcess()) as runner:
            show_load(runner.run(request), self.verbose)
            with suppress(OSError):  # a pipe or a device has no old text
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
