"""Answers that are decoded side by side: token for token those of the engine, one by one."""

import pytest
import torch
from support.engines import tokens
from support.families import VOCABULARY
from support.native_engines import native_engine

from medusa_chat.decoding.answer import BROKEN
from medusa_chat.decoding.backends.native_step import NativeTexts
from medusa_chat.errors import MedusaChatError
from medusa_chat.training import answerers
from medusa_chat.training.answerers import NativeAnswerer, PromptBatch

MOST = 14
ENDS = (3, 5)


def make_batches(temperatures=(0.0, 0.9)):
    """Eleven prompts of several lengths, in batches of three."""
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 2, 4, 7, 9, 9, 16, 17, 20, 25, 31)
    prompts = [torch.randint(VOCABULARY, (size,), generator=generator).tolist() for size in lengths]
    parts = [prompts[at : at + 3] for at in range(0, len(prompts), 3)]
    return [
        PromptBatch(part, temperatures[number % len(temperatures)], 2**40 + number)
        for number, part in enumerate(parts)
    ]


def one_by_one(engine, batches, most=MOST):
    """What the engine's plain decoding gives, each answer up to its end token."""
    answers = []
    for batch in batches:
        for row, prompt in enumerate(batch.prompts):
            settings = {"temperature": batch.temperature, "seed": batch.seed_of(row)}
            found = tokens(engine, prompt, max_new_tokens=most, **settings)
            ends = [place for place, token in enumerate(found) if token in ENDS]
            answers.append(found[: ends[0] + 1] if ends else found)
    return answers


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_answers_are_those_of_the_engine_alone(library, family, dtype, threads):
    expected = one_by_one(native_engine(family, library, 1, dtype), make_batches())
    assert len({len(answer) for answer in expected}) > 2  # so that slots are taken anew
    step = native_engine(family, library, threads, dtype).backend
    for rows in (1, 2, 4, 16):
        assert list(NativeAnswerer(step, ENDS, rows).answer(make_batches(), MOST)) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_skipped_does_not_change_the_others(library, temperature):
    step, batches = native_engine("llama", library).backend, make_batches((temperature,))
    whole = list(NativeAnswerer(step, ENDS, 4).answer(batches, MOST))
    for skip in range(len(whole) + 1):
        assert list(NativeAnswerer(step, ENDS, 4).answer(batches, MOST, skip)) == whole[skip:]


def test_memory_limits_how_many_stand_side_by_side(library, monkeypatch):
    step, batches = native_engine("llama", library).backend, make_batches()
    expected = list(NativeAnswerer(step, ENDS).answer(batches, MOST))
    asked, real = [], NativeTexts

    class Asked(real):
        def __init__(self, decoder, *sizes):
            asked.append(sizes)
            super().__init__(decoder, *sizes)

    monkeypatch.setattr(answerers, "NativeTexts", Asked)
    most_bytes = 2 * real.bytes_of(step.decoder, 31 + MOST)
    monkeypatch.setattr(answerers, "MOST_BYTES", most_bytes)
    assert list(NativeAnswerer(step, ENDS).answer(batches, MOST)) == expected
    assert asked == [(2, 31 + MOST)]


def test_an_answer_ends_where_the_context_does(library):
    step = native_engine("llama", library).backend
    context = step.backbone.context
    batches = [PromptBatch([[1] * (context - 3), [2, 4]], 0.0, 0)]
    first, second = NativeAnswerer(step, ()).answer(batches, MOST)
    assert (len(first), len(second)) == (3, MOST)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_invalid_numbers_in_any_row_are_an_error(library, temperature):
    """One text's next token has an embedding that is no number."""
    engine = native_engine("llama", library)
    batches = [PromptBatch([[1, 2, 4]], temperature, 0), PromptBatch([[7, 8]], temperature, 1)]
    bad = one_by_one(engine, batches[:1], 1)[0][0]
    with torch.no_grad():
        engine.backbone.model.get_input_embeddings().weight[bad] = float("nan")
    with pytest.raises(MedusaChatError) as error:
        list(NativeAnswerer(engine.backend, ()).answer(batches, MOST))
    assert str(error.value) == BROKEN
