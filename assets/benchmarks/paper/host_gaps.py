"""Study "host": the share of a step that is neither the draft nor the pass."""

from collections.abc import Iterator

from medusa_chat.bench.answers import Question, Variant, events_of
from medusa_chat.bench.context import BenchContext
from medusa_chat.bench.rows import Row, row
from medusa_chat.decoding.events import Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT

GAP_PROMPT = 64  # tokens


def host_gaps(context: BenchContext) -> Iterator[Row]:
    """The share of a step that only the host needs, neither for the draft nor for the pass, in
    answers to a made-up prompt."""
    name = "host gap in a step"
    vocabulary = context.loaded.engine.backbone.vocabulary
    prompt = Question([(31 * i + 7) % vocabulary for i in range(GAP_PROMPT)], "")
    for tree in (ROOT, context.source.head(max(context.loaded.info.nodes, 4))):
        shares = []
        for number in range(context.rounds + 1):
            events = events_of(context, prompt, Variant(GenerationSettings(), tree))
            steps = [event for event in events if isinstance(event, Step)]
            if number and steps:
                known = sum(step.heads_seconds + step.backbone_seconds for step in steps)
                shares.append(1 - known / sum(step.seconds for step in steps))
        shown = "plain" if len(tree) == 1 else f"{len(tree)} nodes"
        if shares:
            yield row(f"{name}, {shown}", shares, "share")
