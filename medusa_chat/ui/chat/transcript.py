"""Transcript: a conversation at one moment, and the turn that an answer was asked with."""

import threading
from dataclasses import dataclass, field

from medusa_chat.messages import Message
from medusa_chat.ui.chat.answer import Answer


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
            {position: note for position, note in self.notes.items() if position < length},
            {position: answer for position, answer in self.answers.items() if position < length},
        )

    def plus(
        self, role: str, text: str, answer: Answer | None = None, note: str = ""
    ) -> "Transcript":
        """One message more."""
        position = len(self.messages)
        return Transcript(
            (*self.messages, {"role": role, "content": text}),
            self.notes | ({position: note} if note else {}),
            self.answers | ({position: answer} if answer else {}),
        )

    def with_text(self, position: int, text: str) -> "Transcript":
        """The same with an answer of the model rewritten: its steps belong to it no longer."""
        message: Message = {"role": "assistant", "content": text}
        return Transcript(
            (*self.messages[:position], message, *self.messages[position + 1 :]),
            {at: note for at, note in self.notes.items() if at != position},
            {at: answer for at, answer in self.answers.items() if at != position},
        )

    def length_before_answer(self) -> int:
        """How many messages there are up to the last one of the user; 0 without one."""
        for position in range(len(self.messages) - 1, -1, -1):
            if self.messages[position]["role"] == "user":
                return position + 1
        return 0


@dataclass
class Turn:
    """What is there again when nothing comes of an answer. text: of the user, for the box.
    before: the conversation.

    is_paced: the browser shows the answer slower than it comes, and the turn lasts until `shown`
    is set. cut: how many steps were shown when it was stopped; None: it was not.
    """

    text: str
    before: Transcript
    is_paced: bool = False
    shown: threading.Event = field(default_factory=threading.Event)
    cut: int | None = None
