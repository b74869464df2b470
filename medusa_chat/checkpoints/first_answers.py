"""First answers: whether heads that ship fit the weights that were found."""

from collections.abc import Sequence

from medusa_chat.checkpoints.chat_template import renderer
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.decoding.events import Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import Tree

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Give me three tips for a good night's sleep.",
    "Write a short letter to a friend who has moved away.",
    "How does a bicycle stay upright?",
)
TOKENS = 24  # of each answer
NODES = 4  # a second in all on two cores
FAR = 0.4  # of the drafted tokens that the calibration promises: less is no chance any more


def first_answers(loaded: LoadedModel) -> str:
    """Tokens a step of short greedy answers beside what the calibration promises, as a sentence;
    empty where there is no calibration or no chat template to ask by."""
    if loaded.calibration is None or not loaded.tokenizer.chat_template:
        return ""
    auto = loaded.auto_tree(NODES)
    found, expected = _tokens_a_step(loaded, auto.tree), auto.expected[-1]
    said = (
        f"first answers: {found:.2f} tokens a step with {auto.nodes} nodes, where the calibration "
        f"expects {expected:.2f}"
    )
    if found - 1 < FAR * (expected - 1):
        said += (
            ": these weights are not those that the heads were trained for, so that --drafter "
            "prompt-lookup may be faster"
        )
    return said


def _tokens_a_step(loaded: LoadedModel, tree: Tree) -> float:
    engine = loaded.engine
    settings = GenerationSettings("medusa", nodes=len(tree), max_new_tokens=TOKENS, seed=0)
    counts: list[int] = []
    for question in QUESTIONS:
        drafter = engine.drafter(settings, tree)
        for event in engine.generate(_ids(loaded, question), drafter, settings, details=False):
            if isinstance(event, Step):
                counts.append(len(event.token_ids))
    engine.forget()
    return sum(counts) / max(1, len(counts))


def _ids(loaded: LoadedModel, question: str) -> Sequence[int]:
    asked = [{"role": "user", "content": question}]
    text = renderer().render(loaded.tokenizer, asked, continues=False)
    ids: list[int] = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
