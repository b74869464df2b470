"""Every drafter on the same prompts, in turns within one process: speed, tokens a step, texts.

    python assets/benchmarks/drafters.py FILE.jsonl [--checkpoint NAME] [--backbone PLACE]
        [--precision NAME] [--count N] [--tokens N] [--rounds N] [--max-context N] [--json]

FILE.jsonl: rows with a "prompt", or with "turns", of which the first is asked, as benchmarks have
them; of many rows `count` are taken, evenly spread. Temperature 0, the page's way of decoding
(details, the tuner's step times, which are measured first). Of an answer the fastest round counts.
speed: against plain decoding, by the time of the answers without their prompts. same: answers whose
tokens are plain decoding's.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.decoding.events import Finished
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.prompt_ids import encode
from medusa_chat.runtime.reply import resolve, with_times_and_text
from medusa_chat.runtime.tuner import tune

DRAFTERS = ("none", "medusa", "prompt-lookup", "auto")


def questions(file: Path, count: int) -> list[str]:
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    chosen = rows[:: max(1, len(rows) // count)][:count]
    return [row["prompt"] if "prompt" in row else row["turns"][0] for row in chosen]


def measure(
    loaded: LoadedModel, texts: Sequence[str], rounds: int, most: int
) -> list[dict[str, object]]:
    """`table` of the answers to some questions, of `most` tokens."""
    prompts = [encode(loaded, [{"role": "user", "content": text}])[0] for text in texts]
    found: dict[str, list[list[Finished]]] = {name: [[] for _ in prompts] for name in DRAFTERS}
    order = random.Random(0)
    for _ in range(rounds):
        for number, ids in enumerate(prompts):
            for name in order.sample(DRAFTERS, len(DRAFTERS)):
                found[name][number].append(answer(loaded, ids, name, most))
    return table(
        {name: [min(one, key=seconds_of) for one in tries] for name, tries in found.items()}
    )


def answer(loaded: LoadedModel, ids: list[int], drafter: str, most: int) -> Finished:
    asked = GenerationSettings(drafter=drafter, temperature=0.0, max_new_tokens=most, seed=1)
    settings, made = resolve(loaded, asked)
    loaded.engine.forget()
    *_, last = with_times_and_text(loaded, loaded.engine.generate(ids, made, settings))
    assert isinstance(last, Finished)
    return last


def seconds_of(last: Finished) -> float:
    """Without the prompt."""
    return last.stats.busy_seconds or last.stats.seconds


def table(found: dict[str, list[Finished]]) -> list[dict[str, object]]:
    """found: drafter -> the fastest answer to each prompt."""
    plain, rows = found["none"], []
    for name, answers in found.items():
        seconds = [sum(map(seconds_of, one)) for one in (plain, answers)]
        steps = sum(a.stats.steps for a in answers)
        tokens = sum(a.stats.emitted for a in answers)
        same = sum(a.token_ids == b.token_ids for a, b in zip(answers, plain, strict=True))
        rows.append(
            {
                "drafter": name,
                "speed": round(seconds[0] / seconds[1], 3),
                "tokens_per_second": round(tokens / seconds[1], 1),
                "tokens_per_step": round(tokens / steps, 3),
                "same": f"{same} of {len(answers)}",
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--checkpoint", default="smollm2")
    parser.add_argument("--backbone")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-context", type=int, default=4096)
    parser.add_argument("--json", action="store_true")
    wish = parser.parse_args()
    request = LoadRequest(
        *(wish.checkpoint, wish.backbone),
        precision=wish.precision,
        max_context=wish.max_context,
    )
    loaded = [model for _, model in load(request)][-1]
    assert loaded is not None
    for _ in tune(loaded):
        pass
    texts = questions(wish.file, wish.count)
    rows = measure(loaded, texts, wish.rounds, wish.tokens)
    if wish.json:
        facts = {"precision": loaded.info.precision, "device": loaded.info.device}
        shown = {"file": wish.file.name, "prompts": len(texts), "tokens": wish.tokens, **facts}
        print(json.dumps({**shown, "rows": rows}, indent=1))
        return
    for row in rows:
        print("  ".join(f"{value!s:>14}" for value in row.values()))


if __name__ == "__main__":
    main()
