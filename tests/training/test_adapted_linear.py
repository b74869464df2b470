"""A linear layer with its LoRA as one step of autograd, against peft's own, and its dropout."""

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.training_models import random_llama

from medusa_chat.training import lora
from medusa_chat.training.adapted_linear import dropped
from medusa_chat.training.lora import add_adapter, set_dropout
from medusa_chat.training.stage_recipes import HeadRecipe, JointRecipe

RATE = 0.25
RECIPE = JointRecipe(heads=HeadRecipe(), rank=4, alpha=6, dropout=RATE)


def adapted(monkeypatch: pytest.MonkeyPatch, model: Any, is_fused: bool) -> Any:
    """The model with an adapter that is not zero; by peft's own forward, or fused."""
    with monkeypatch.context() as patch:
        if not is_fused:
            patch.setattr(lora, "fuse_adapters", lambda wrapped: None)
        wrapped, _ = add_adapter(model, RECIPE)
    for number, parameter in enumerate(p for p in wrapped.parameters() if p.requires_grad):
        torch.manual_seed(number)
        torch.nn.init.normal_(parameter, std=0.2)
    return wrapped.to(model.dtype) if model.dtype == torch.float64 else wrapped


def test_an_adapter_is_made_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add_adapter(random_llama(24), RECIPE)


def both(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> tuple[Any, Any]:
    model = random_llama(24, num_hidden_layers=2, attention_bias=True).to(dtype)
    ours, theirs = (adapted(monkeypatch, deepcopy(model), fused) for fused in (True, False))
    set_dropout(ours, False)
    set_dropout(theirs, False)
    return ours, theirs


def results(wrapped: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states of some tokens, and the adapter's gradients of a sum of them."""
    ids = torch.arange(14).view(2, 7)
    hidden = wrapped.get_base_model().get_decoder()(input_ids=ids).last_hidden_state
    weights = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
    (hidden.double() * weights).sum().backward()
    return hidden, {n: p.grad for n, p in wrapped.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.06)],
)
def test_hidden_states_and_gradients_are_those_of_peft(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float
) -> None:
    ours, theirs = both(monkeypatch, dtype)
    (hidden, found), (wanted_hidden, wanted) = results(ours), results(theirs)
    assert found.keys() == wanted.keys() and len(found) == 28
    assert hidden.dtype == wanted_hidden.dtype == dtype
    pairs = [(hidden, wanted_hidden), *((found[name], wanted[name]) for name in wanted)]
    for one, other in pairs:
        assert one.dtype == other.dtype
        assert (one - other).abs().max() <= tolerance * other.abs().max()


def test_gradients_are_those_of_differences_with_dropout_on() -> None:
    """Of two outputs under one seed, for the input and both matrices."""
    wrapped, _ = add_adapter(random_llama(24).double(), RECIPE)
    layer = wrapped.get_base_model().model.layers[0].mlp.up_proj.double()
    torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.2)
    set_dropout(wrapped, True)
    torch.manual_seed(5)
    x = torch.randn(3, 2, 32, dtype=torch.float64, requires_grad=True)

    def output(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return layer(x)

    weights = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert torch.autograd.gradcheck(output, (x, *weights))


def test_the_dropout_is_of_the_adapters_input_and_is_repeated_by_a_seed() -> None:
    wrapped, _ = add_adapter(random_llama(24), RECIPE)
    layer = wrapped.get_base_model().model.layers[0].mlp.up_proj
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    x = torch.randn(5, 32)

    def run(is_on: bool) -> torch.Tensor:
        set_dropout(wrapped, is_on)
        torch.manual_seed(3)
        return layer(x).detach()

    assert torch.equal(run(True), run(True)) and not torch.equal(run(True), run(False))
    torch.manual_seed(3)
    kept = torch.ones(5 * 32).index_fill_(0, dropped(5 * 32, RATE), 0.0).view(5, 32)
    inner = layer.lora_A["default"](x * kept / (1 - RATE))
    expected = layer.base_layer(x) + layer.lora_B["default"](inner) * (6 / 4)
    torch.testing.assert_close(run(True), expected)


def test_every_value_is_dropped_as_often_as_any_other() -> None:
    torch.manual_seed(0)
    times = torch.zeros(200)
    for _ in range(4000):
        places = dropped(200, 0.05)
        assert (places.diff() > 0).all()
        times[places] += 1
    deviation = (4000 * 0.05 * 0.95) ** 0.5
    assert abs(times.mean() - 200) < 5 * deviation / 200**0.5
    assert (times - 200).abs().max() < 5 * deviation
    assert 0.7 < times.var() / deviation**2 < 1.3


def test_an_adapter_that_is_off_or_merged_is_left_to_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = both(monkeypatch, torch.float64)
    ids = torch.arange(14).view(2, 7)
    before = random_llama(24, num_hidden_layers=2, attention_bias=True).double()(input_ids=ids)
    with ours.disable_adapter():
        torch.testing.assert_close(ours(input_ids=ids).logits, before.logits)
    wanted = theirs(input_ids=ids).logits
    torch.testing.assert_close(ours.merge_and_unload()(input_ids=ids).logits, wanted)
