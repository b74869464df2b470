"""`medusa-chat chat`: a conversation in the terminal, as over ssh on the machine with the GPU."""

import sys
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Annotated

from typer import Option

from medusa_chat.cli.generate import DecodingOptions
from medusa_chat.cli.options import value
from medusa_chat.cli.progress_line import note
from medusa_chat.cli.prompts import clean_text
from medusa_chat.cli.terminal import answer, show_load
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import Message
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.runner import InProcess

END = "Ctrl-Z, Enter" if sys.platform == "win32" else "Ctrl-D"
HELP = (
    f"/new begins anew, /undo takes back a turn, /regen answers again, /quit or {END} ends, "
    "Ctrl-C stops an answer"
)
ASK = "> "


@dataclass(frozen=True)
class TalkOptions:
    """How a conversation begins, and its own temperature."""

    system: Annotated[str | None, value("TEXT", "System prompt of the conversation.")] = None
    temperature: Annotated[float, Option(help="0 to 2; 0: greedy.")] = 0.7


@dataclass(frozen=True)
class Chat(TalkOptions, DecodingOptions):
    """Chat in the terminal: one line is one message. Nothing of it is kept."""

    def run(self) -> None:
        """Check the options, load the model in this process, and talk until the input ends."""
        request = self.load_request()
        settings = self.settings()
        system = clean_text(self.system, "--system") if self.system is not None else ""
        first: list[Message] = [{"role": "system", "content": system}] if system else []
        with closing(InProcess()) as runner:
            show_load(runner.run(request), self.verbose)
            note(HELP)
            said = list(first)
            while (line := _asked()) is not None:
                if line == "/quit":
                    return
                if line == "/new":
                    said = list(first)
                elif line == "/undo":
                    said = said[:-2] if len(said) > len(first) else said
                elif line == "/regen" and len(said) > len(first):
                    said = self._answered(runner, said[:-2], said[-2]["content"], settings) or said
                elif line == "/regen":
                    note("there is no answer to regenerate: write a message first")
                elif line.strip():
                    said = self._answered(runner, said, line, settings) or said

    def _answered(
        self, runner: InProcess, said: list[Message], line: str, settings: GenerationSettings
    ) -> list[Message]:
        """The conversation with another turn; empty where that is refused, or stopped before any
        text."""
        try:
            asked: list[Message] = [*said, {"role": "user", "content": clean_text(line, "it")}]
            reply = Reply(asked, settings, drops_oldest=True)
            last, _ = answer(runner, reply, False, None, self.verbose)
        except UsageError as error:
            note(str(error))
            return []
        if last is None or not (last.text or last.reasoning):
            return []
        answered = {"role": "assistant", "content": last.text, "reasoning": last.reasoning}
        return [*asked, answered]


def _asked() -> str | None:
    """The next line, None at the end of the input. Ctrl-C forgets a line, twice it ends all."""
    if sys.stdin is None:  # it was closed
        return None
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  arrows, and the lines before
    for is_told in (False, True):
        try:
            return input(ASK if is_terminal else "")
        except EOFError:
            break
        except KeyboardInterrupt:
            print()
            if is_told:
                raise
            note("Ctrl-C once more, or /quit, ends")
    return None
