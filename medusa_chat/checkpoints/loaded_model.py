"""LoadedModel: a model that decodes, with its tokenizer, its auto tree and what to tell of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from medusa_chat.checkpoints.control_tokens import ControlTokens, Typed
from medusa_chat.decoding.detokenizer import TokenTexts
from medusa_chat.decoding.draft_budget import DraftBudget
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.reasoning import Markup, ReasoningReader, State, markup_of
from medusa_chat.decoding.tree import Tree
from medusa_chat.messages import ModelInfo
from medusa_chat.trees.auto_tree import auto_tree
from medusa_chat.trees.calibration import Calibration
from medusa_chat.trees.tuning_store import Tuning


@dataclass
class PlainTime:
    """Seconds that timing plain steps beside answers may take, and those of such a step as last
    timed (runtime/plain_clock.py)."""

    allowed: float = 0.0
    step: float = 0.0


class CachedText(NamedTuple):
    """A conversation whose ids are in the cache. The answer stands from `answer` on in its text;
    typed: where the messages before it hold the text of control tokens."""

    text: str
    ids: list[int]
    answer: int
    typed: Sequence[Typed]

    def begins(self, text: str, typed: Sequence[Typed]) -> bool:
        """Whether another text begins with this one, and with the same control tokens: a message
        may repeat what the template has written."""
        before = [one for one in typed if one.start < self.answer]
        return text.startswith(self.text) and before == list(self.typed)


@dataclass
class LoadedModel:
    """A model ready to decode: engine, tokenizer, the default tree and what to tell about it."""

    engine: Engine
    tokenizer: Any
    texts: TokenTexts
    calibration: Calibration | None
    info: ModelInfo
    usual: tuple[int, str]  # nodes of its auto tree until it is tuned, and why (usual_nodes.py)
    said: CachedText | None = None  # the last conversation
    tuned: Tuning | None = None
    budgets: dict[str, DraftBudget] = field(default_factory=dict)  # by drafter; they learn
    trees: dict[int | None, tuple[Tree, str]] = field(default_factory=dict)  # auto, once asked
    plain: PlainTime = field(default_factory=PlainTime)
    told: set[int] = field(default_factory=set)  # what was said once (runtime/reply.py)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The tokens that a message must not be able to write."""
        return ControlTokens(self.tokenizer)

    @cached_property
    def markup(self) -> Markup:
        """How the model writes its reasoning."""
        added = (token.content for token in self.tokenizer.added_tokens_decoder.values())
        return markup_of(str(self.tokenizer.chat_template or ""), added)

    def reasoning_reader(self, state: State) -> ReasoningReader:
        """A reader of an answer that begins in this state. Special tokens have no text in it."""
        id_of = self.tokenizer.backend_tokenizer.token_to_id
        markers = {id_of(text): text for text in self.markup.markers}
        markers = {id: text for id, text in markers.items() if id in self.texts.special}
        return ReasoningReader(self.markup, markers, state)

    def auto_tree(self, nodes: int | None = None) -> tuple[Tree, str]:
        """The auto tree of so many nodes, None for as many as pay best, and why. Kept: to find it
        takes as long as to read a short prompt. Raises UsageError for more than the tree has."""
        if nodes not in self.trees:
            heads, device = self.info.heads, self.engine.backbone.device
            known = self.calibration, heads, device, self.usual
            self.trees[nodes] = auto_tree(*known, nodes, self.tuned)
        return self.trees[nodes]
