"""LoadedModel: a model that decodes, with its tokenizer, its auto tree and what to tell of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from medusa_chat.checkpoints.control_tokens import ControlTokens, Typed
from medusa_chat.decoding.budget import Budget, PassCost, StepTimes
from medusa_chat.decoding.detokenizer import TokenTexts
from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.drafters.kinds import Kind
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.reasoning import Markup, ReasoningReader, State, markup_of
from medusa_chat.messages import ModelInfo
from medusa_chat.trees.auto_tree import AutoTree, auto_tree
from medusa_chat.trees.calibration import Calibration


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
    """A model ready to decode: engine, tokenizer, what its drafts follow from, what to tell of it.
    times: of its steps, which they teach. budgets: by drafter; they learn. pass_cost: of the draft
    model, if there is one."""

    engine: Engine
    tokenizer: Any
    texts: TokenTexts
    calibration: Calibration | None
    info: ModelInfo
    times: StepTimes
    said: tuple[CachedText, ...] = ()  # the last two conversations, the last one first
    budgets: dict[str, Budget] = field(default_factory=dict)
    pass_cost: PassCost | None = None
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

    def remember(self, said: CachedText) -> None:
        """Keep a conversation, and the last one that it does not go on from."""
        others = (one for one in self.said if not said.text.startswith(one.text))
        self.said = (said, *others)[:2]

    @property
    def is_cut(self) -> bool:
        """Whether each draft may keep a part of its nodes: where no step is recorded."""
        return self.engine.backend.tries == 0 and self.engine.backbone.device.type == "cpu"

    def auto_tree(self, nodes: int | None = None) -> AutoTree:
        """The auto tree of so many nodes, None for as many as should pay now. Raises UsageError
        for more than the tree has."""
        return auto_tree(self.calibration, self.info.heads, self.times, self.is_cut, nodes)

    def budget(
        self, drafter: str, expected: Sequence[float], is_cut: bool, kind: Kind | None = None
    ) -> Budget:
        """The budget of a drafter for the next answer, with what it has learnt. kind: which one
        drafts for "auto", if there are several."""
        name = f"{drafter}, {kind.name}" if kind else drafter
        if name not in self.budgets:
            by_passes = kind is not None and kind.has_own_tree
            self.budgets[name] = Budget(self.times, self.pass_cost if by_passes else None)
        budget = self.budgets[name]
        budget.begin(expected, is_cut)
        return budget

    def kind_for_auto(self) -> Kind | None:
        """What drafts for "auto" beside the text: the kind with the most tokens a second so far,
        after a try of each; None where there is none."""
        own = [k for k in kinds.kinds_of(self.info.heads, self.info.beside) if k.source]
        known = {kind: self.budgets.get(f"{kinds.AUTO}, {kind.name}") for kind in own}
        return max(own, key=lambda k: b.gain if (b := known[k]) else math.inf, default=None)
