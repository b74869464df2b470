"""Transcript: a conversation at one moment, and the turn that an answer was asked with."""

from dataclasses import dataclass, field

from medusa_chat.messages import Message
from medusa_chat.ui.chat.answer import Answer
from medusa_chat.ui.page.inputs import Inputs


@dataclass(frozen=True)
class Transcript:
    """A conversation at one moment. notes, answers: by position of the message they belong to."""

    messages: tuple[Message, ...] = ()
    notes: dict[int, str] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)

    def head(self, length: int) -> "Transcript":
        """The first messages of it."""
        return Transcript(
            self.messages[:length],
            {place: note for place, note in self.notes.items() if place < length},
            {place: answer for place, answer in self.answers.items() if place < length},
        )

    def plus(
        self, role: str, text: str, answer: Answer | None = None, note: str = ""
    ) -> "Transcript":
        """One message more."""
        place = len(self.messages)
        return Transcript(
            (*self.messages, {"role": role, "content": text}),
            self.notes | ({place: note} if note else {}),
            self.answers | ({place: answer} if answer else {}),
        )


@dataclass(frozen=True)
class Turn:
    """What an answer was asked with. text: of the user, given back when nothing comes of it."""

    inputs: Inputs
    text: str = ""
    before: Transcript = field(
        default_factory=Transcript
    )  # what is there again when nothing comes of it
