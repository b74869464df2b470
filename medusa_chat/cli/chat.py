"""`medusa-chat chat`: a conversation in the terminal, for instance over ssh."""

import sys
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Annotated

from typer import Option

from medusa_chat.cli.generate import DecodingOptions, clean_text
from medusa_chat.cli.options import value
from medusa_chat.cli.terminal import answer, note, show_load
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import Message
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.runner import InProcess

END = "Ctrl-Z, Enter" if sys.platform == "win32" else "Ctrl-D"
HELP = (
    f"/new starts over, /undo removes the last turn, /regen answers again, /quit or {END} quits, "
    "Ctrl-C stops an answer"
)
PROMPT = "> "


@dataclass(frozen=True)
class ChatOptions:
    """The system prompt, and a temperature with another default."""

    system: Annotated[str | None, value("TEXT", "System prompt of the conversation.")] = None
    temperature: Annotated[float, Option(help="0 to 2; 0: greedy.")] = 0.7


@dataclass(frozen=True)
class Chat(ChatOptions, DecodingOptions):
    """Chat in the terminal: one line is one message. Nothing is saved."""

    def run(self) -> None:
        """Check the options, load the model in this process, chat until the input ends."""
        request = self.load_request()
        settings = self.settings()
        system = clean_text(self.system, "--system") if self.system is not None else ""
        start: list[Message] = [{"role": "system", "content": system}] if system else []
        with closing(InProcess()) as runner:
            show_load(runner.run(request), self.verbose)
            note(HELP)
            messages = list(start)
            while (line := _read_line()) is not None:
                if line == "/quit":
                    return
                if line == "/new":
                    messages = list(start)
                elif line == "/undo":
                    messages = messages[:-2] if len(messages) > len(start) else messages
                elif line == "/regen" and len(messages) > len(start):
                    messages = (
                        self._answer(runner, messages[:-2], messages[-2]["content"], settings)
                        or messages
                    )
                elif line == "/regen":
                    note("there is no answer to regenerate: write a message first")
                elif line.strip():
                    messages = self._answer(runner, messages, line, settings) or messages

    def _answer(
        self, runner: InProcess, messages: list[Message], line: str, settings: GenerationSettings
    ) -> list[Message]:
        """The conversation with one more turn; empty if the message is refused, or the answer is
        stopped before any text."""
        try:
            asked: list[Message] = [
                *messages,
                {"role": "user", "content": clean_text(line, "the message")},
            ]
            reply = Reply(asked, settings, drops_oldest=True)
            last, _ = answer(runner, reply, False, None, self.verbose)
        except UsageError as error:
            note(str(error))
            return []
        if last is None or not (last.text or last.reasoning):
            return []
        answered = {"role": "assistant", "content": last.text, "reasoning": last.reasoning}
        return [*asked, answered]


def _read_line() -> str | None:
    """The next line; None at the end of the input. Ctrl-C discards the line, twice in a row it
    quits."""
    if sys.stdin is None:  # it was closed
        return None
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  arrow keys and history
    for is_warned in (False, True):
        try:
            return input(PROMPT if is_terminal else "")
        except EOFError:
            break
        except KeyboardInterrupt:
            print()
            if is_warned:
                raise
            note("press Ctrl-C again or type /quit to quit")
    return None
