"""Penalties against their formulas, node by node, and against transformers."""

import pytest
import torch
from support.drafts import draft_of
from support.engines import PROMPT, TREES, engine_of, tokens
from support.families import tiny

from medusa_chat.decoding.penalties import Penalties
from medusa_chat.decoding.settings import GenerationSettings


def literal(logit, settings, in_text, count):
    if in_text:
        factor = settings.repetition_penalty
        logit = logit / factor if logit > 0 else logit * factor
    return logit - settings.frequency_penalty * count - settings.presence_penalty * (count > 0)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7},
        {"frequency_penalty": -0.4},
        {"repetition_penalty": 0.8, "presence_penalty": 1.1, "frequency_penalty": 0.3},
    ],
)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_each_node_is_penalised_for_its_own_text(options, tree):
    torch.manual_seed(1)
    settings, prompt, answer = GenerationSettings(**options), [3, 3, 5], [4, 3, 7]
    drafted = [7, *torch.randint(9, (len(tree) - 1,)).tolist()]
    logits = torch.randn(len(tree), 12)
    given = logits.tolist()
    penalties = Penalties(settings, prompt)
    penalties.add(answer)
    penalties.apply(logits, draft_of(tree, drafted))
    for node, path in enumerate(tree.paths):
        own = [*answer, *(drafted[one] for one in path[1:])]
        expected = [
            literal(given[node][token], settings, token in (*prompt, *own), own.count(token))
            for token in range(12)
        ]
        assert logits[node].tolist() == pytest.approx(expected, abs=1e-6)


def test_greedy_text_with_a_repetition_penalty_is_that_of_transformers():
    model = tiny("llama")
    ids = torch.tensor([PROMPT])
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        repetition_penalty=1.7,
        max_new_tokens=20,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(PROMPT) :].tolist()
    options = {"temperature": 0.0, "max_new_tokens": 20}
    engine = engine_of(model)
    assert tokens(engine, repetition_penalty=1.7, **options) == expected
    assert tokens(engine, **options) != expected
