"""Medusa-2's losses and its resume; and several processes that train as one."""

import functools
import itertools
import json
import socket
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.children import run_together
from support.training_models import conversations, write_backbone, write_rows
from transformers import AutoModelForCausalLM

from medusa_chat.cli.main import main
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.training.examples import Example, collate
from medusa_chat.training.joint import (
    add_adapter,
    joint_loss,
    linear_names,
    next_tokens,
    train_jointly,
    weight_of_heads,
)
from medusa_chat.training.loss import IGNORED, HeadLosses, ShortVocabulary, head_targets
from medusa_chat.training.process_group import ProcessGroup
from medusa_chat.training.recipe import Recipe
from medusa_chat.training.trainer import new_heads, stream_batches

RECIPE = Recipe(
    method="medusa-2",
    max_steps=5,
    batch_tokens=60,
    warmup_steps=1,
    learning_rate=1e-2,
    head_learning_rate_multiplier=2.0,
    lora_rank=4,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("joint")
    write_backbone(folder / "backbone")
    write_backbone(folder / "tied", tied=True)
    write_rows(folder / "data.jsonl", conversations(10))
    return folder


def read(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def examples(count: int = 9) -> list[Example]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(5, 20, (14,), generator=generator).tolist() for _ in range(count)]
    return [Example(tuple(r), (False,) * 3 + (True,) * 11, f"row {i}") for i, r in enumerate(rows)]


def test_next_token_is_asked_for_only_where_it_is_a_label() -> None:
    batch = collate([Example((7, 8, 9, 10), (False, True, False, True))])
    assert next_tokens(batch).tolist() == [[8, IGNORED, 10, IGNORED]]


def test_a_shortlist_is_of_the_heads_loss_and_not_of_the_backbones(folder: Path) -> None:
    """Of Medusa-2 on a tied LM head, which no adapter changes."""
    model = read(folder / "tied")
    heads, lm_head = new_heads(model.lm_head, 2), LogitHead(model.lm_head, model.config)
    every, listed = (
        ShortVocabulary.of(ids, lm_head) for ids in (range(len(model.lm_head.weight)), [5, 7, 9])
    )
    wrapped, _ = add_adapter(model, RECIPE)

    def found(short: ShortVocabulary | None) -> HeadLosses:
        rows = examples(3)
        return joint_loss(wrapped, heads, rows, RECIPE, 0.2, short=short)

    whole, same, few = found(None), found(every), found(listed)
    torch.testing.assert_close(same.total, whole.total)
    torch.testing.assert_close(few.lm, whole.lm)
    assert (few.labels < whole.labels).all() and (few.losses < whole.losses).all()


def test_gradients_of_the_joint_loss_are_those_of_its_formula(folder: Path) -> None:
    """The LM head's adapter learns from both losses, the decoder's through both."""
    wrapped, _ = add_adapter(read(folder / "backbone"), RECIPE)
    base = wrapped.eval().get_base_model()
    heads = new_heads(base.lm_head, 2)
    learning = [p for p in (*wrapped.parameters(), *heads.parameters()) if p.requires_grad]
    for number, parameter in enumerate(learning):
        torch.manual_seed(number)
        torch.nn.init.normal_(parameter, std=0.05)
    batch = collate(examples(3))
    hidden = base.get_decoder()(input_ids=batch.ids).last_hidden_state
    loss = functools.partial(torch.nn.functional.cross_entropy, ignore_index=IGNORED)
    direct = loss(base.lm_head(hidden).flatten(0, 1), next_tokens(batch).flatten())
    targets = head_targets(batch.ids, batch.is_label, 2)
    roots = batch.ids.roll(-1, 1).flatten()
    for k, logits in enumerate(heads(hidden.flatten(0, 1), roots, base.lm_head)):
        direct = direct + 0.2 * 0.8 ** (k + 1) * loss(logits, targets.flatten(0, 1)[:, k])
    expected = torch.autograd.grad(direct, learning)
    found = joint_loss(wrapped, heads, examples(3), RECIPE, 0.2)
    torch.testing.assert_close(found.total, direct)
    for ours, theirs in zip(torch.autograd.grad(found.total, learning), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("distill", [False, True])
def test_a_process_without_a_row_has_its_part_in_every_sum(folder: Path, distill: bool) -> None:
    """Of a batch of one row the second of two processes gets it without labels."""
    steps = stream_batches(examples(1), RECIPE, 0, ProcessGroup(rank=1, size=2))
    _, rows = next(steps)
    wrapped, _ = add_adapter(read(folder / "backbone"), RECIPE)
    heads = new_heads(wrapped.get_base_model().get_output_embeddings().base_layer, 2)
    found = joint_loss(wrapped, heads, rows, replace(RECIPE, distill=distill), 0.2)
    found.total.backward()
    assert found.total == 0 and not found.labels.any() and found.lm == 0
    learning = [p for p in (*wrapped.parameters(), *heads.parameters()) if p.requires_grad]
    assert all(p.grad is None or not p.grad.any() for p in learning)


def test_adapter_is_on_every_linear_and_an_untied_lm_head(folder: Path) -> None:
    seven = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert set(linear_names(read(folder / "backbone"))) == seven | {"lm_head"}
    assert set(linear_names(read(folder / "tied"))) == seven


def test_an_adapter_is_made_without_a_warning(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add_adapter(read(folder / "backbone"), RECIPE)


def test_teacher_is_the_backbone_without_its_adapter(folder: Path) -> None:
    wrapped, _ = add_adapter(read(folder / "backbone"), RECIPE)
    heads = new_heads(wrapped.get_base_model().get_output_embeddings().base_layer, 2)
    distilled = replace(RECIPE, distill=True)
    rows = examples(3)
    fresh = joint_loss(wrapped, heads, rows, distilled, 0.0).lm
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    moved = joint_loss(wrapped, heads, rows, distilled, 0.0).lm
    assert fresh is not None and moved is not None
    assert abs(float(fresh)) < 1e-6 < 1e-3 < float(moved)


def test_sine_grows_to_its_peak_at_the_last_step() -> None:
    sine = replace(RECIPE, lambda0=0.01, lambda0_schedule="sine")
    weights = [weight_of_heads(step, sine) for step in range(RECIPE.steps)]
    assert weights == sorted(weights) and weights[-1] == pytest.approx(0.01)
    assert weights[0] == pytest.approx(0.01 * 0.30902, rel=1e-4)  # sin(pi/2 / 5)


def test_interrupted_joint_training_goes_on_to_the_same_bits(folder: Path, tmp_path: Path) -> None:
    def run(state: Path | None, stop: int | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        wrapped, _ = add_adapter(read(folder / "backbone"), RECIPE)
        heads = new_heads(wrapped.get_base_model().get_output_embeddings().base_layer, 2)
        events = train_jointly(wrapped, heads, examples(), RECIPE, state=state)
        losses = [event.loss for event in itertools.islice(events, stop)]
        events.close()
        return losses, {n: p for n, p in wrapped.named_parameters() if p.requires_grad}

    whole, wanted = run(None, None)
    first, _ = run(tmp_path / "joint.pt", 3)
    rest, found = run(tmp_path / "joint.pt", None)
    assert first + rest == whole
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_two_processes_give_the_losses_of_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line(folder, tmp_path / "one")) == 0
    one = losses_of(capsys.readouterr().out)
    first, second = together(line(folder, tmp_path / "two"), tmp_path)
    two = losses_of(first)
    assert second == "" and (tmp_path / "two" / "config.json").is_file()
    assert len(one) == len(two) == 4
    assert two == pytest.approx(one, rel=1e-4)


def line(folder: Path, output: Path) -> list[str]:
    options = ["--recipe", "medusa-1", "--max-steps", "4", "--heads", "2", "--batch-tokens", "150"]
    options += ["--sequence-length", "60", "--device", "cpu", "--precision", "fp32", "--json"]
    start = ["train", "--backbone", str(folder / "backbone"), "--output", str(output)]
    return [*start, "--data", str(folder / "data.jsonl"), *options]


def losses_of(said: str) -> list[float]:
    events = [json.loads(row) for row in said.splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"]


def together(line: list[str], folder: Path) -> list[str]:
    """What each of two processes says, told of each other as `accelerate launch` tells them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    place |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    return run_together(folder, line, ranks)
