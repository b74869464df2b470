"""What a plan's time is made of, and that timing a batch changes nothing."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.training_models import write_backbone
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from medusa_chat.training import plan, step_timing
from medusa_chat.training.data import Example
from medusa_chat.training.lora import adapter_size, add_adapter
from medusa_chat.training.recipe import Recipe
from medusa_chat.training.stage_recipes import HeadRecipe, JointRecipe
from medusa_chat.training.step_timing import joint_batch_seconds
from medusa_chat.training.trainer import new_heads

STAGE = HeadRecipe(steps=60, batch_tokens=60, cache_hidden=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan") / "backbone"
    write_backbone(folder, tied=True)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def examples(count=9):
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(5, 20, (14,), generator=generator).tolist() for _ in range(count)]
    return [Example(tuple(r), (False,) * 3 + (True,) * 11, f"row {i}") for i, r in enumerate(rows)]


@pytest.mark.parametrize(
    ("method", "stages", "distill", "seconds"),
    [
        ("medusa-1", 1, False, 60 * 3),
        ("medusa-2", 1, True, 60 * 10),
        ("medusa-2", 2, False, 60 * (3 + 10)),
        ("medusa-2", 2, True, 60 * (3 + 10 - 1)),  # without the teacher's pass
    ],
)
def test_each_stage_is_timed_by_a_batch_of_its_own(
    monkeypatch, model, method, stages, distill, seconds
):
    monkeypatch.setattr(plan, "batch_seconds", lambda *_: (1.0, 2.0))
    monkeypatch.setattr(plan, "joint_batch_seconds", lambda *_: 10.0)
    setup = SimpleNamespace(model=model, lm_head=None)
    recipe = Recipe(method=method, stages=stages, distill=distill)
    found = plan._seconds(setup, None, examples(), recipe, STAGE, None)
    assert found == seconds


def test_kept_hidden_states_take_one_pass_over_an_epoch():
    cached = HeadRecipe(steps=60, cache_hidden=True)
    assert plan.head_stage_seconds(1.0, 2.0, 5, cached) == 5 + 120


def test_of_kept_hidden_states_a_step_of_their_size_is_timed(monkeypatch, model):
    rows = []

    def loss(heads, lm_head, hidden, *_):
        rows.append(len(hidden))
        return SimpleNamespace(total=torch.zeros((), requires_grad=True))

    monkeypatch.setattr(step_timing, "medusa_loss", loss)
    heads = new_heads(model.lm_head, 2)
    for is_cached in (True, False):
        recipe = HeadRecipe(batch_tokens=60, batch_labels=5, cache_hidden=is_cached)
        step_timing.batch_seconds(model, model.lm_head, heads, examples(), recipe)
    assert rows[0] == 5 < rows[1]


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_is_as_large_as_planned_on_packed_weights_too(tmp_path, tied):
    write_backbone(tmp_path / "backbone", tied=tied)
    read = partial(AutoModelForCausalLM.from_pretrained, tmp_path / "backbone")
    packed = read(quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    for model in (read(), packed):
        planned = adapter_size(model, 4)
        wrapped, _ = add_adapter(model, JointRecipe(STAGE, rank=4))
        tensors = [p for n, p in wrapped.named_parameters() if "lora_" in n]
        assert planned == sum(p.numel() for p in tensors) > 0


@pytest.mark.parametrize("distill", [True, False])
def test_a_timed_joint_batch_has_every_pass_and_leaves_the_model_alone(model, distill):
    heads = new_heads(model.lm_head, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    passes = []
    hook = model.get_decoder().register_forward_hook(lambda *_: passes.append(1))
    recipe = JointRecipe(STAGE, distill=distill, rank=4)
    assert joint_batch_seconds(model, heads, examples(), recipe) > 0
    hook.remove()
    assert len(passes) == (2 if distill else 1)  # the teacher's too
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(p.grad is None for p in (*model.parameters(), *heads.parameters()))
