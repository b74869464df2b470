"""Talk: a conversation at one moment, and the turn that an answer was asked with. No gradio."""

from dataclasses import dataclass, field

from medusa_chat.messages import Message
from medusa_chat.ui.chat.answer import Answer
from medusa_chat.ui.page.inputs import Inputs


@dataclass(frozen=True)
class Talk:
    """A conversation at one moment. notes, answers: by position of the message they belong to."""

    messages: tuple[Message, ...] = ()
    notes: dict[int, str] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)

    def head(self, length: int) -> "Talk":
        """The first messages of it."""
        return Talk(
            self.messages[:length],
            {place: note for place, note in self.notes.items() if place < length},
            {place: answer for place, answer in self.answers.items() if place < length},
        )

    def plus(self, role: str, text: str, answer: Answer | None = None, note: str = "") -> "Talk":
        """One message more."""
        place = len(self.messages)
        return Talk(
            (*self.messages, {"role": role, "content": text}),
            self.notes | ({place: note} if note else {}),
            self.answers | ({place: answer} if answer else {}),
        )


@dataclass(frozen=True)
class Turn:
    """What an answer was asked with. text: of the user, given back when nothing comes of it."""

    inputs: Inputs
    text: str = ""
    before: Talk = field(default_factory=Talk)  # what is there again when nothing comes of it
