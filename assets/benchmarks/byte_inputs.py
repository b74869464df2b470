"""What rounding a product's inputs to 8 bits changes, beside a GGUF file's weights in fp32.

    python assets/benchmarks/byte_inputs.py FILE.gguf --prompts FILE.jsonl [--prompts ANOTHER.jsonl]
        [--tokens 4000] [--length 64] --output FILE.jsonl

The model answers the prompts greedily by its C pass, as `generate` does. Then both read each answer
behind its prompt: the C pass, and transformers' layers in fp32 with eager attention, a layer's
weights unpacked at a time, nothing rounded. Of each token of an answer: KL(fp32 || C) in nats, and
whether the likeliest token is the same. A row for each answer goes to --output as it is done; run
again, it goes on behind them. The sums are printed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_chat.bench.answers import spread
from medusa_chat.bench.context import read_model
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.checkpoints.tree_check import reference_logits
from medusa_chat.decoding.backends.native_weights import NativeLinear
from medusa_chat.decoding.events import Finished
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.prompt import encode
from medusa_chat.training.conversations import read_conversations

CONTEXT = 1024
LONGEST = 400  # tokens of a prompt: the logits of all of them are in memory


def prompts_of(loaded: LoadedModel, files: list[Path], count: int) -> list[list[int]]:
    """The first turns of the files, `count` of them evenly spread, in turns, as tokens."""
    read = [read_conversations(file, prompts=True).conversations for file in files]
    each = [spread([row.asked[0] for row in rows], count // len(files)) for rows in read]
    texts = [text for some in zip(*each, strict=False) for text in some]
    has_template = loaded.tokenizer.chat_template
    asked = ([{"role": "user", "content": t}] if has_template else t for t in texts)
    return [ids for one in asked if len(ids := list(encode(loaded, one).ids)) <= LONGEST]


def answer_of(loaded: LoadedModel, prompt: list[int], length: int) -> list[int]:
    """The greedy answer by plain steps."""
    engine, settings = loaded.engine, GenerationSettings("none", max_new_tokens=length, seed=0)
    engine.forget()
    *_, last = engine.generate(prompt, engine.drafter(settings, ROOT), settings, details=False)
    assert isinstance(last, Finished)
    return list(last.token_ids)


@torch.inference_mode()
def both(loaded: LoadedModel, prompt: list[int], answer: list[int]) -> tuple[Tensor, Tensor]:
    """Log-probabilities float32 [n, V] of the answer's places: by fp32, and by the C pass."""
    backbone, ids = loaded.engine.backbone, torch.tensor(prompt + answer[:-1])
    places = slice(len(prompt) - 1, None)
    loaded.engine.forget()
    ours = backbone.lm_head(backbone.run_chunk(ids)[places]).float()
    loaded.engine.forget()
    wanted = reference_logits(backbone, ids)[places].float()
    return wanted.log_softmax(-1), ours.log_softmax(-1)


def measured(loaded: LoadedModel, prompt: list[int], length: int) -> dict[str, Any]:
    """A row of the output."""
    answer = answer_of(loaded, prompt, length)
    if not answer:
        return {"prompt": len(prompt), "answer": [], "kl": [], "same": []}
    wanted, ours = both(loaded, prompt, answer)
    divergence = (wanted.exp() * (wanted - ours)).sum(-1)
    same = wanted.argmax(-1) == ours.argmax(-1)
    return {
        "prompt": len(prompt),
        "answer": answer,
        "kl": [round(x, 7) for x in divergence.tolist()],
        "same": [int(x) for x in same],
    }


def summed(rows: list[dict[str, Any]]) -> str:
    """The figures of all answers."""
    kl = torch.tensor([x for row in rows for x in row["kl"]], dtype=torch.float64)
    same = torch.tensor([x for row in rows for x in row["same"]], dtype=torch.float64)
    return (
        f"{len(kl)} tokens of {len(rows)} answers: KL {kl.mean():.5f} nats, at most "
        f"{kl.max():.3f}; the same likeliest token at {same.mean():.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    lines = asked.output.read_text("utf-8").splitlines() if asked.output.exists() else []
    rows = [json.loads(line) for line in lines]
    request = LoadRequest(asked.file, device="cpu", max_context=CONTEXT, offline=True)
    loaded = read_model(request, print)
    for module in loaded.engine.backbone.model.modules():
        if isinstance(module, NativeLinear):
            module.rounded = lambda x: x  # the reference rounds no inputs
    prompts = prompts_of(loaded, asked.prompts, 3 * asked.tokens // asked.length)
    for prompt in prompts[len(rows) :]:
        if sum(len(row["kl"]) for row in rows) >= asked.tokens:
            break
        rows.append(measured(loaded, prompt, asked.length))
        with asked.output.open("a", encoding="utf-8") as out:
            out.write(json.dumps(rows[-1]) + "\n")
    print(loaded.info.name, summed(rows), sep=": ")


if __name__ == "__main__":
    main()
