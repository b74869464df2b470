"""What rounding weights as a GPU holds them changes: KL of the demo's next tokens, on a CPU.

    python assets/benchmarks/rounded_weights.py [--texts N]

The demo reads conversations.jsonl in fp32 three times: with its own weights, with every linear but
the LM head in 8 bits with a scale for each row, and in nf4 with double quantisation, as
bitsandbytes makes both for a GPU. Printed are the mean KL(fp32 || rounded) in nats, and how often
the likeliest token is the same.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from medusa_chat.checkpoints.tokenizer import read_tokenizer

HERE = Path(__file__).parent
DEMO = HERE.parent / "demo"


def by_rows(weight: Tensor) -> Tensor:
    """int8: 127 steps of each row's largest number."""
    scales = weight.abs().amax(1, True) / 127
    return (weight / scales).round() * scales


def by_nf4(weight: Tensor) -> Tensor:
    """nf4, its scales in 8 bits."""
    packed, state = quantize_4bit(
        weight.bfloat16().contiguous(), compress_statistics=True, quant_type="nf4"
    )
    found: Tensor = dequantize_4bit(packed, state)
    return found.float()


def rounded(model: Any, way: Callable[[Tensor], Tensor]) -> Any:
    """A copy with rounded linears, but for the LM head."""
    copy = deepcopy(model)
    for module in copy.modules():
        if isinstance(module, nn.Linear) and module is not copy.get_output_embeddings():
            module.weight.data = way(module.weight.data)
    return copy


def texts(count: int | None) -> Iterator[Tensor]:
    """The conversations as tokens, int64 [1, n]."""
    config = json.loads((DEMO / "config.json").read_text("utf-8"))
    tokenizer = read_tokenizer(DEMO, config["vocab_size"])
    for line in (HERE / "conversations.jsonl").read_text("utf-8").splitlines()[:count]:
        text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        yield ids[:, : config["max_position_embeddings"]]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int)
    asked = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    others = {name: rounded(model, way) for name, way in (("int8", by_rows), ("nf4", by_nf4))}
    found: dict[str, list[Tensor]] = {name: [] for name in others}
    same: dict[str, list[Tensor]] = {name: [] for name in others}
    for ids in texts(asked.texts):
        exact = model(input_ids=ids).logits[0].log_softmax(-1)
        for name, other in others.items():
            ours = other(input_ids=ids).logits[0].log_softmax(-1)
            found[name].append((exact.exp() * (exact - ours)).sum(-1))
            same[name].append(exact.argmax(-1) == ours.argmax(-1))
    for name, parts in found.items():
        kl, alike = torch.cat(parts).double(), torch.cat(same[name]).double()
        print(
            f"{name}: {len(kl)} tokens, KL {kl.mean():.5f} nats, at most {kl.max():.3f}; "
            f"the same likeliest token at {alike.mean():.1%}"
        )


if __name__ == "__main__":
    main()
