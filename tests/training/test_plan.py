"""What a plan says of an adapter."""

from functools import partial

import pytest
from support.training_models import write_backbone
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from medusa_chat.training.joint import adapter_size, add_adapter
from medusa_chat.training.recipe import Recipe


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_is_as_large_as_planned_on_packed_weights_too(tmp_path, tied):
    write_backbone(tmp_path / "backbone", tied=tied)
    read = partial(AutoModelForCausalLM.from_pretrained, tmp_path / "backbone")
    packed = read(quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    for model in (read(), packed):
        planned = adapter_size(model, 4)
        wrapped, _ = add_adapter(model, Recipe(lora_rank=4))
        tensors = [p for n, p in wrapped.named_parameters() if "lora_" in n]
        assert planned == sum(p.numel() for p in tensors) > 0
