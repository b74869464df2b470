"""How long a step of a real model takes on a CPU, and which part of it is not the backbone's pass.

    python assets/benchmarks/real_model.py FOLDER [--rounds N] [--tokens N] [--json]

FOLDER: a model and its tokenizer as transformers saves them. Plain decoding, prompt lookup and
Medusa with heads of random weights (nothing they draft is accepted), at temperature 0 without
details and at the page's defaults (temperature 0.7, details). Random heads are run with 4 nodes at
every step. Milliseconds a step, the fastest fifth of all steps; to compare two versions run this in
turns with each of them on PYTHONPATH.
"""

import argparse
import json
from statistics import mean

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_chat.checkpoints.prepare import prepare
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.events import Step
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT, Tree

PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Repeat this list three times: apples, pears, plums, cherries, apples, pears, plums, cherries.",
)
TREE = Tree.from_choices([(0,), (1,), (0, 0)])
KINDS = {"greedy": (0.0, False), "page": (0.7, True)}


def engine_of(folder: str) -> tuple[Engine, list[list[int]]]:
    """The engine with random heads, and the prompts' tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    heads = MedusaHeads(3, model.config.hidden_size, dtype=torch.bfloat16).requires_grad_(False)
    torch.nn.init.normal_(heads.weight, std=0.05)
    backend, notes = prepare(model, heads, torch.device("cpu"), 1024)
    print(notes[-1], flush=True)
    asked = ([{"role": "user", "content": text}] for text in PROMPTS)
    made = (tokenizer.apply_chat_template(a, add_generation_prompt=True) for a in asked)
    return Engine(backend, heads), [list(ids["input_ids"]) for ids in made]


def steps_of(
    engine: Engine, ids: list[int], drafter: str, kind: str, count: int
) -> tuple[list[Step], int]:
    """The steps of an answer after its first ones, and how many tokens they gave."""
    temperature, details = KINDS[kind]
    settings = GenerationSettings(
        drafter, temperature=temperature, max_new_tokens=count, nodes=16, seed=1
    )
    tree = TREE if drafter == "medusa" else ROOT
    engine.forget()
    maker = engine.drafter(settings, tree)
    events = engine.generate(ids, maker, settings, details)
    steps = [event for event in events if isinstance(event, Step)][4:]
    return steps, sum(len(step.token_ids) for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    engine, prompts = engine_of(asked.folder)
    found: dict[str, list[Step]] = {}
    tokens: dict[str, int] = {}
    for _ in range(asked.rounds):
        for kind in KINDS:
            for drafter in ("none", "prompt-lookup", "medusa"):
                for number, ids in enumerate(prompts):
                    name = f"{kind}, {drafter}, prompt {number + 1}"
                    steps, said = steps_of(engine, ids, drafter, kind, asked.tokens)
                    found.setdefault(name, []).extend(steps)
                    tokens[name] = tokens.get(name, 0) + said
    rows = {}
    for name, steps in found.items():
        fast = sorted(steps, key=lambda step: step.seconds)[: max(1, len(steps) // 5)]
        whole = mean(step.seconds for step in fast)
        rest = mean(s.seconds - s.backbone_seconds - s.heads_seconds for s in fast)
        rows[name] = {
            "ms": 1e3 * whole,
            "rules": rest / whole,
            "nodes": mean(step.nodes for step in steps),
            "tokens": tokens[name] / len(steps),
        }
    if asked.json:
        print(json.dumps(rows))
    else:
        for name, row in rows.items():
            print(
                f"{name:34} {row['ms']:7.3f} ms, {row['rules']:6.1%} of it not pass or draft, "
                f"{row['nodes']:.1f} nodes, {row['tokens']:.2f} tokens a step"
            )


if __name__ == "__main__":
    main()
