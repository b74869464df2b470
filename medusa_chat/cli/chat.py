"""`medusa-chat chat`: a conversation in the terminal, for instance over ssh."""

import re
import sys
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Annotated

from typer import Option

from medusa_chat.cli.generate import DecodingOptions, clean_text
from medusa_chat.cli.options import value
from medusa_chat.cli.terminal import answer, note, show_load
from medusa_chat.decoding.settings import GenerationSettings, sampling_words, with_defaults
from medusa_chat.errors import UsageError
from medusa_chat.messages import Message
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.runner import InProcess

END = "Ctrl-Z, Enter" if sys.platform == "win32" else "Ctrl-D"
HELP = (
    "/new starts over, /undo removes the last turn, /regen answers again, /defaults takes the "
    f"model's own sampling, /help shows this, /quit or {END} quits, Ctrl-C stops an answer"
)
PROMPT = "> "
COMMAND = re.compile(r"/[a-z]+")
TEMPERATURE = 0.7  # of a model that names none


@dataclass(frozen=True)
class ChatOptions:
    """The system prompt, and a temperature with another default."""

    system: Annotated[str | None, value("TEXT", "System prompt of the conversation.")] = None
    temperature: Annotated[
        float | None, Option(help="0 to 2; 0: greedy. Default: the model's, else 0.7.")
    ] = None


@dataclass(frozen=True)
class Chat(ChatOptions, DecodingOptions):
    """Chat in the terminal: one line is one message. Nothing is saved."""

    def run(self) -> None:
        """Check the options, load the model in this process, chat until the input ends."""
        request = self.load_request()
        start = self._start()
        with closing(InProcess()) as runner:
            model = show_load(runner.run(request), self.verbose)
            defaults = {"temperature": TEMPERATURE, **(model.sampling if model else {})}
            settings = self.settings(defaults)
            note(HELP)
            messages = list(start)
            while (line := _read_line()) is not None:
                if line == "/quit":
                    return
                if line == "/defaults":
                    settings = with_defaults(settings, defaults)
                    note(f"model's defaults: {sampling_words(defaults)}")
                else:
                    messages = self._obey(runner, messages, line, settings, start)

    def _start(self) -> list[Message]:
        """What every conversation begins with: the system prompt, or the preset's."""
        if self.system is not None:
            return [{"role": "system", "content": clean_text(self.system, "--system")}]
        return self.chosen.before([]) if self.chosen else []

    def _obey(
        self,
        runner: InProcess,
        messages: list[Message],
        line: str,
        settings: GenerationSettings,
        start: list[Message],
    ) -> list[Message]:
        """The conversation after a line: a command, or a message that is answered."""
        match line.strip():
            case "":
                return messages
            case "/new":
                return list(start)
            case "/undo":
                return messages[:-2] if len(messages) > len(start) else messages
            case "/regen" if len(messages) > len(start):
                before, asked = messages[:-2], messages[-2]["content"]
                return self._answer(runner, before, asked, settings) or messages
            case "/regen":
                note("there is no answer to regenerate: write a message first")
                return messages
            case command if COMMAND.fullmatch(command):
                note(HELP if command == "/help" else f"there is no {command}: {HELP}")
                return messages
        return self._answer(runner, messages, line, settings) or messages

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
