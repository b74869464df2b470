"""Heads from scratch: time, memory and tokens a step, by how long they learn.

    python assets/benchmarks/heads.py [--steps 100 300 800] [--output FILE.json]

Each budget is `medusa-chat train --distill` of the demo's backbone on conversations.jsonl in a
process of its own: the answers are made once, by the backbone, and counted in each. Then
questions.jsonl is answered greedily with the first 16 nodes of the tree that it found. peak: the
process's largest memory over that of the same program before it loads anything, against what the
plan says weights, optimizer and a batch take.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

HERE = Path(__file__).parent
PROGRAM = [sys.executable, "-m", "medusa_chat"]
NODES = "16"
IDLE = "import torch, transformers, medusa_chat.training.run as run; run.train"


def give(result: dict[str, Any], output: Path | None) -> None:
    """Print what was measured, and write it where a file was named."""
    text = json.dumps(result, indent=2)
    print(text)
    if output:
        output.write_text(text + "\n", "utf-8")


def run(command: list[str]) -> tuple[str, float, int]:
    """(what it printed, its seconds, its largest resident memory in bytes)."""
    started = perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE)
        assert child.stderr is not None
        said = child.stderr.read().decode(errors="replace")
        _, status, usage = os.wait4(child.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(command)}\n{said[-2000:]}")
        out.seek(0)
        return out.read(), perf_counter() - started, usage.ru_maxrss * 1024


def train(folder: Path, steps: int) -> tuple[list[dict[str, Any]], float, int]:
    """Its events, seconds and memory."""
    data = str(HERE / "conversations.jsonl")
    command = [*PROGRAM, "train", "--data", data, "--distill", "--output", str(folder)]
    command += ["--max-steps", str(steps), "--precision", "fp32", "--device", "cpu", "--json"]
    text, seconds, peak = run(command)
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")], seconds, peak


def prompts(kept: Path) -> Path:
    """The first question of each conversation, as `generate` reads them."""
    rows = map(json.loads, (HERE / "questions.jsonl").read_text("utf-8").splitlines())
    file = kept / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": row["turns"][0]}) + "\n" for row in rows), "utf-8"
    )
    return file


def per_step(folder: Path, asked: Path) -> float:
    """Tokens a step over all questions, of answers with 16 nodes."""
    command = [*PROGRAM, "generate", "--checkpoint", str(folder), "--nodes", NODES, "--json"]
    command += ["--prompts", str(asked), "--precision", "fp32"]
    command += ["--device", "cpu", "--temperature", "0", "--max-new-tokens", "128"]
    stats = [
        event["stats"]
        for event in map(json.loads, run(command)[0].splitlines())
        if event.get("event") == "finished" and event["stats"]["steps"]
    ]
    emitted = sum(s["acceleration_rate"] * s["steps"] for s in stats)
    return float(emitted / sum(s["steps"] for s in stats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 300, 800])
    parser.add_argument("--output", type=Path)
    wish = parser.parse_args()
    idle = run([sys.executable, "-c", IDLE])[2]
    rows = []
    with tempfile.TemporaryDirectory() as kept:
        asked = prompts(Path(kept))
        for steps in wish.steps:
            folder = Path(kept) / str(steps)
            events, seconds, peak = train(folder, steps)
            plan = next(e for e in events if "memory_bytes" in e)
            row = {
                "steps": steps,
                "minutes": round(seconds / 60, 2),
                "tokens_per_step": round(per_step(folder, asked), 3),
                "peak_mb": round((peak - idle) / 1e6, 1),
                "planned_mb": round(plan["memory_bytes"] / 1e6, 1),
                "labels": plan["labels"],
            }
            row["peak_over_planned"] = round(row["peak_mb"] / row["planned_mb"], 2)
            rows.append(row)
            print(json.dumps(row), flush=True)
            shutil.rmtree(folder)
    best = rows[-1]["tokens_per_step"]
    for row in rows:
        row["share_of_longest"] = round(row["tokens_per_step"] / best, 3)
    result = {"command": f"python {' '.join(sys.argv)}", "cores": os.cpu_count(), "rows": rows}
    give(result, wish.output)


if __name__ == "__main__":
    main()
