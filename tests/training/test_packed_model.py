"""A training on a GGUF file as it is: answers and hidden states are the C pass's."""

import json
from pathlib import Path

import pytest
import torch
from support.gguf_models import tiny_model, write_gguf
from support.training_models import write_rows

from medusa_chat.checkpoints import device_plan, native_build
from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.memory_needs import MemoryNeeds
from medusa_chat.cli.main import main
from medusa_chat.errors import OutOfMemoryError
from medusa_chat.messages import LoadRequest
from medusa_chat.training.answerers import NativeAnswerer, PromptBatch, fastest_answerer
from medusa_chat.training.examples import Example, collate
from medusa_chat.training.loss import caching_inputs, head_inputs
from medusa_chat.training.packed_model import KeptStates, PackedModel, read_packed, states_of
from medusa_chat.training.process_group import ALONE
from medusa_chat.training.recipe import Recipe, TrainRequest
from medusa_chat.training.setup import prepare_setup

SIZES = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256}
PROMPTS = ([5, 6, 7], [8, 9], [5, 6, 7, 8, 10, 11])
pytestmark = pytest.mark.skipif(native_build.library() is None, reason="no C compiler")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("packed") / "a.gguf", tiny_model(**SIZES), "Q8_0")


@pytest.fixture(scope="module")
def model(file: Path) -> PackedModel:
    found = read_packed(file, 64)
    assert found is not None
    return found


def answered(model: PackedModel) -> list[Example]:
    """Its answers of 12 tokens to PROMPTS, as examples; their states are kept."""
    batch = PromptBatch(PROMPTS, 0.0, 0)
    answers = fastest_answerer(model, 64, []).answer([batch], 12)
    return [
        Example((*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer), str(number))
        for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True))
    ]


def test_states_that_were_kept_are_those_of_a_pass(model: PackedModel) -> None:
    examples = answered(model)
    kept = head_inputs(model, collate(examples), 3)
    model.kept = KeptStates()
    again = head_inputs(model, collate(examples), 3)
    assert kept.hidden.dtype == torch.bfloat16 and len(kept.hidden) == 3 * 11
    for one, other in zip(kept, again, strict=True):
        assert torch.equal(one, other)


def test_only_so_many_states_are_kept(model: PackedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "medusa_chat.training.packed_model"
    monkeypatch.setattr(f"{module}.KEPT_BYTES", 12 * 64 * 2)
    model.kept = KeptStates()
    first, *others = answered(model)
    assert model.kept.take(torch.tensor([*first.ids, 0, 0])) is not None
    assert all(model.kept.take(torch.tensor(one.ids)) is None for one in others)
    assert model.kept.take(torch.tensor([0, 0])) is None


def test_a_lack_of_memory_names_the_option_of_train(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_plan, "_free_bytes", lambda device: 200_000)
    monkeypatch.setattr(MemoryNeeds, "_longest", lambda self, precision: 4096)
    with pytest.raises(OutOfMemoryError, match="--sequence-length 4096 would fit"):
        read_packed(file, 64)


def test_answers_are_those_of_decoding_and_the_lm_head_is_the_files(
    file: Path, model: PackedModel
) -> None:
    *_, (_, loaded) = load(LoadRequest(str(file), device="cpu", max_context=64))
    assert loaded is not None
    step = loaded.engine.backend
    expected = list(NativeAnswerer(step, []).answer([PromptBatch(PROMPTS, 0.0, 0)], 12))
    assert [list(one.ids[-12:]) for one in answered(model)] == expected
    hidden = states_of(loaded.engine, torch.tensor(PROMPTS[2])).clone()
    ours = model.get_output_embeddings()(hidden.to(model.head.weight.dtype)).float()
    exact = loaded.engine.backbone.lm_head(hidden).float()
    assert (ours - exact).abs().max() < 0.02 * exact.abs().max()


def test_a_resumed_training_reads_texts_whose_states_are_gone(model: PackedModel) -> None:
    model.kept = KeptStates()
    examples = answered(model)
    model.kept = KeptStates()
    *_, inputs = run(caching_inputs(model, 3, examples, Recipe()))
    assert len(inputs.hidden) == 3 * 11 and inputs.hidden.any(-1).all()


def run(steps):
    """The events of a generator and, last, its result."""
    found = []
    while True:
        try:
            found.append(next(steps))
        except StopIteration as end:
            return [*found, end.value]


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ({}, "Q8_0"),
        ({"precision": "fp32"}, "fp32"),
        ({"recipe": Recipe(method="medusa-2", stages=2)}, None),
    ],
)
def test_a_file_is_unpacked_only_where_that_is_asked_or_its_weights_learn(
    file: Path, options: dict, precision: str | None
) -> None:
    request = TrainRequest(str(file), (), Path("heads"), **{"recipe": Recipe(), **options})
    setup = run(prepare_setup(request, ALONE))[-1]
    assert setup.is_packed == (precision == "Q8_0")
    assert any("is unpacked to" in note for note in setup.notes) != setup.is_packed
    assert setup.precision == precision or precision is None


def test_heads_of_a_packed_file_are_trained_and_decode(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = tmp_path / "prompts.jsonl", tmp_path / "heads"
    write_rows(data, [{"prompt": f"{word} and {word}"} for word in "one two three four".split()])
    asked = ["train", "--backbone", str(file), "--data", str(data), "--output", str(output)]
    asked += ["--distill", "--max-steps", "3", "--heads", "2", "--device", "cpu", "--json"]
    assert main([*asked, "--batch-tokens", "512"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (plan,) = (event for event in events if event["event"] == "plan")
    assert plan["precision"] == "Q8_0"
    *_, (_, loaded) = load(LoadRequest(str(output), str(file), device="cpu"))
    assert loaded is not None and loaded.info.heads == 2 and loaded.info.precision == "Q8_0"
