"""On a machine with an NVIDIA GPU: `python assets/benchmarks/gpu.py --out FILE.json`, ten minutes.

What the GPU reads at most, which attention of torch's is right there, our kernels' parity, every
model family's answers, the steps of a 7B and an 8B shape (random weights, no download) with a
profile and with a drafter, `generate` of transformers beside them, the app's own process, and where
Medusa's text parts from plain decoding's in each number format. Every part runs in a process of its
own, those whose time does not matter side by side, and the file is written after each. --dry-run
runs the same code on a CPU.
"""

import argparse
import sys
from pathlib import Path

from gpu_runner import DONE, Part, run_parts

QUANTISED = ("bitsandbytes",)
MODEL, EXACT = "model", "exactness-model"  # need --model
SHORT, LONG = [1000, 4000], [8000, 32000]  # tokens before a step
FP16 = {"shape": "7b", "precision": "fp16"}
BF16 = {"shape": "8b", "precision": "bf16"}

PARTS = (  # what tells most first: the last ones may find no time
    Part("machine", "gpu_reading:machine", 60),
    *(
        Part(f"kernels-{name}", "gpu_kernels:parity", 150, {"name": name}, is_timed=False)
        for name in ("fp16", "bf16", "fp32")
    ),
    *(
        Part(f"families-{name}", "gpu_families:answers", 150, {"name": name}, is_timed=False)
        for name in ("fp16", "bf16", "fp32")
    ),
    Part("blocks-parity", "gpu_blocks:parity", 150, is_timed=False),
    Part("recorded", "gpu_kernels:recorded_parity", 150, is_timed=False),
    Part("attention-probe", "gpu_attention:probe", 120, is_timed=False),
    Part("nf4-merged", "gpu_nf4:merged", 90, {}, QUANTISED, is_timed=False),
    Part("ceiling", "gpu_reading:ceiling", 60),
    Part("7b-fp16", "gpu_steps:steps", 150, {**FP16, "lengths": SHORT}),
    Part("7b-drafter", "gpu_drafters:steps", 90, {**FP16, "length": SHORT[0]}),
    Part("app", "gpu_app:worker", 150),
    Part(MODEL, "gpu_app:speeds", 120, {"precision": "bf16"}),
    Part("7b-nf4", "gpu_nf4:steps", 150, {"lengths": SHORT}, QUANTISED),
    Part("7b-q4k", "gpu_blocks:steps", 150, {"lengths": SHORT[:1]}),
    Part("exactness-demo", "gpu_divergence:demo", 120),
    Part(EXACT, "gpu_divergence:model", 120),
    Part("generate", "gpu_generate:dynamic", 90),
    Part("8b-bf16", "gpu_steps:steps", 120, {**BF16, "lengths": LONG}),
    Part("blocks-products", "gpu_blocks:product_times", 90),
    Part("quantised-products", "gpu_nf4:product_times", 60, {}, QUANTISED),
    Part("7b-shortlist", "gpu_steps:steps", 90, {**FP16, "lengths": SHORT[:1], "shortlist": 8192}),
    Part("7b-int8", "gpu_nf4:steps", 90, {"lengths": SHORT[:1], "bits": 8}, QUANTISED),
    Part("generate-compiled", "gpu_generate:static", 200),
)


def main() -> None:
    asked = arguments()
    parts = chosen(asked.parts, asked.model)
    options = {
        "device": "cpu" if asked.dry_run else "cuda",
        "is_dry": asked.dry_run,
        "model": asked.model,
    }
    for report in run_parts(parts, asked.out, options, asked.minutes, progress):
        if (outcome := report["parts"]["machine"]["outcome"]) != DONE:
            sys.exit(outcome)
    progress(f"written: {asked.out}")


def arguments() -> argparse.Namespace:
    names = ", ".join(part.name for part in PARTS)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), metavar="FILE.json")
    parser.add_argument("--parts", metavar="A,B", help=f"of {names}")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts")
    parser.add_argument("--model", metavar="CHECKPOINT[,BACKBONE]", help=f"for {MODEL} and {EXACT}")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    return parser.parse_args()


def chosen(names: str | None, model: str | None) -> tuple[Part, ...]:
    """The parts that --parts names, in our order; always the machine that their figures are of."""
    if names is None:
        return tuple(part for part in PARTS if model or part.name not in (MODEL, EXACT))
    wanted = {"machine", *names.split(",")}
    if unknown := wanted - {part.name for part in PARTS}:
        sys.exit(f"there is no part {min(unknown)!r}: see --help")
    return tuple(part for part in PARTS if part.name in wanted)


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
