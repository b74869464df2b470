"""Tab: what the server knows of one browser tab."""

from dataclasses import dataclass, field

from medusa_chat.ui.chat.answer import Answer
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.page.pace import Pace


@dataclass
class Tab:
    """One browser tab: whose chat it shows, what it has drawn, and which answer it shows.

    scope: whose conversations it may show; empty until it has come. conversation: the id of the
    one it shows. key: a secret of this tab, by which it asks for the stream of an answer.
    chosen_answer: an earlier answer; None is the latest. number: of the latest it knows. awaits:
    of the one whose end it has not told. has_live: whether it shows what a stream wrote. tinted:
    keys of the pieces it has. list_version, search, listed, shows_bin: of the list of
    conversations.
    pace: as chosen; None is the model's usual one. views: how many it was sent. behind: the one it
    showed at the last look, where that was not the last one sent. turns: how often it was drawn
    anew, which ends the stream of before. streams: how many it had. heard: how many messages its
    box sent. taken: how many of them the server took.
    given, back: how many texts came to nothing, and the last, for its box. told: how many failures
    of the store it was told. has_watched: whether it knows that
    another program has asked. watched: the panel of such an answer as it was last sent; None while
    it watches none. model: the name of the one that was loaded at its last
    view. refused: the transcript_version at which something was, and why. undeleted: the
    conversation whose deletion was refused last, and when.
    """

    scope: str = ""
    conversation: str = ""
    key: str = ""
    version: int = 0
    transcript_version: int = 0
    system: tuple[str, str] | None = None
    asks: int = 0
    is_streaming: bool = False
    has_live: bool = False
    chosen_answer: Answer | None = None
    number: int = 0
    awaits: int = 0
    tinted: set[str] = field(default_factory=set)
    pace: Pace | None = None
    list_version: int = -1
    search: str = ""
    listed: int = 200
    shows_bin: bool = False
    views: int = 0
    behind: int = 0
    turns: int = 0
    streams: int = 0
    heard: int = 0
    taken: int = 0
    given: int = 0
    back: str = ""
    told: int = 0
    has_watched: bool = False
    watched: str | None = None
    model: str = ""
    refused: tuple[int, str] = (0, "")
    undeleted: tuple[str, float] = ("", 0.0)

    def take(self) -> None:
        """What its box held was sent: the browser takes it out of the box."""
        self.taken, self.back = self.taken + 1, ""

    def give(self, text: str) -> None:
        """The browser puts this before what is in the box."""
        if text:
            self.given, self.back = self.given + 1, text

    def is_behind(self, shown: object) -> bool:
        """Whether it has shown an older view than the last one for two looks: the answers to two
        requests may come in another order than they were made. shown: the number of its view."""
        is_older = isinstance(shown, int) and 0 < shown < self.views
        before, self.behind = self.behind, shown if isinstance(shown, int) and is_older else 0
        return is_older and shown == before

    def turn_to(self, chat: ChatSession) -> None:
        """Show another conversation from now on, or this one anew: nothing of it is on the page."""
        if (self.scope, self.conversation) != (chat.scope, chat.id):
            self.awaits, self.refused = 0, (0, "")
            self.number, self.chosen_answer, self.watched = chat.answer.number, None, None
        self.scope, self.conversation = chat.scope, chat.id
        self.version = self.transcript_version = 0
        self.system, self.has_live, self.list_version = None, True, -1
        self.turns += 1
