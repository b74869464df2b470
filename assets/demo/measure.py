"""What the card says, measured: `python assets/demo/measure.py DATA_FOLDER [--checkpoint DIR]`.

Prints Markdown for the card. Everything goes through the same session, engine and settings as the
program itself; only the perplexity asks the backbone directly.
"""

import argparse
import json
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.nn import functional as F

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import backbone  # noqa: E402
import dialogues  # noqa: E402
from backbone import Recipe  # noqa: E402
from build import held_out_conversations  # noqa: E402

from medusa_chat.checkpoints.load import load  # noqa: E402
from medusa_chat.checkpoints.loaded_model import LoadedModel  # noqa: E402
from medusa_chat.decoding.events import Finished  # noqa: E402
from medusa_chat.decoding.settings import GenerationSettings  # noqa: E402
from medusa_chat.messages import LoadRequest, Message  # noqa: E402
from medusa_chat.runtime.reply import reply  # noqa: E402
from medusa_chat.runtime.requests import Reply  # noqa: E402
from medusa_chat.training.examples import encode  # noqa: E402

SEED = 20_260  # of every choice below; training used seeds 0 and 1
NODES = 16
ROWS = 100  # conversations a set for the perplexity
PROMPTS = 200
SUMS = 500
SHOWN = 10


def loaded(checkpoint: str) -> LoadedModel:
    """The checkpoint in fp32 on the CPU."""
    *_, (_, model) = load(LoadRequest(checkpoint, precision="fp32", device="cpu"))
    assert model is not None
    return model


def answer(model: LoadedModel, conversation: Sequence[Message], **settings: object) -> Finished:
    """One answer; greedy unless told otherwise."""
    values = {"temperature": 0.0, "seed": SEED, "max_new_tokens": 256, "nodes": NODES}
    *_, last = reply(model, Reply(list(conversation), GenerationSettings(**{**values, **settings})))
    assert isinstance(last, Finished)
    return last


def held_out_sets(data: Path) -> Iterator[tuple[str, list[dict]]]:
    """(name, conversations that training never saw) of every set, SGD from its dev split."""
    for name in backbone.SETS:
        if name == "sgd":
            yield name, held_out_conversations(data, Recipe(), ROWS, 0)
        else:
            yield name, list(backbone.read_rows(data, name, held_out=True))[:ROWS]
    yield "own dialogues", list(dialogues.generate(templates(data), ROWS, SEED))


def templates(data: Path) -> Path:
    return data / "train" / "templates_raw"


@torch.inference_mode()
def perplexity(model: LoadedModel, rows: list[dict]) -> tuple[float, float, int]:
    """(of the assistant, of all tokens, how many tokens of the assistant); rows cut at 1,024."""
    sums, counts = [0.0, 0.0], [0, 0]
    for row in rows:
        example = encode(model.tokenizer, row["messages"])
        ids, marks = list(example.ids[:1024]), torch.tensor(example.is_label[1:1024])
        logits = model.engine.backbone.model(torch.tensor([ids])).logits[0, :-1]
        losses = F.cross_entropy(logits.float(), torch.tensor(ids[1:]), reduction="none")
        for place, chosen in enumerate((losses[marks], losses)):
            sums[place] += chosen.sum().item()
            counts[place] += len(chosen)
    return math.exp(sums[0] / counts[0]), math.exp(sums[1] / counts[1]), counts[0]


def held_out_prompts(data: Path) -> list[list[Message]]:
    """Conversations of SGD's dev split and of our own, cut before a random answer."""
    chance = random.Random(SEED)
    rows = held_out_conversations(data, Recipe(), 400, 400)
    prompts: list[list[Message]] = []
    for row in chance.sample(rows, PROMPTS):
        turns = [i for i, m in enumerate(row["messages"]) if m["role"] == "assistant"]
        prompts.append(row["messages"][: chance.choice(turns[:8])])
    return prompts


def distinct_4(ids: Sequence[int]) -> float:
    """Share of different ones among an answer's runs of four tokens; 1 for a short answer."""
    runs = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return len(set(runs)) / len(runs) if runs else 1.0


def sums(data: Path) -> list[tuple[str, int, str]]:
    """(question, right value, kind) of one-step sums; answers may be of any size up to 198."""
    maker = dialogues.Maker(dialogues.read_words(templates(data)), random.Random(SEED))
    asked = []
    while len(asked) < SUMS:
        (user, _), value = maker.operation()
        sign = re.findall(
            r"plus|add|\+|minus|subtract|-|times|multiply|[x*]|divided|divide|/", user
        )
        kinds = {"plus": "+", "add": "+", "minus": "-", "subtract": "-"}
        kinds |= {"times": "x", "multiply": "x", "*": "x", "divided": "/", "divide": "/"}
        asked.append((user, value, kinds.get(sign[0], sign[0])))
    return asked


def show_perplexity(model: LoadedModel, data: Path) -> None:
    print("| held-out set | perplexity of the assistant's tokens | of all tokens | tokens |")
    print("|---|---|---|---|")
    for name, rows in held_out_sets(data):
        if rows:
            its, every, count = perplexity(model, rows)
            print(f"| {name} | {its:.2f} | {every:.2f} | {count:,} |")


def show_accuracies(model: LoadedModel) -> None:
    assert model.calibration is not None
    print("\n| head | top-1 | top-2 | top-3 | top-4 | top-5 |\n|---|---|---|---|---|---|")
    for head, row in enumerate(model.calibration.accuracies, start=1):
        reached = (f"{sum(row[: rank + 1]):.2f}" for rank in range(5))
        print(f"| {head} | {' | '.join(reached)} |")


def show_speed(model: LoadedModel, prompts: list[list[Message]]) -> None:
    print(f"\n| {PROMPTS} held-out prompts, {NODES} nodes | tokens a step | ended by itself |")
    print("|---|---|---|")
    for acceptance, temperature in (
        ("exact", 0.0),
        ("exact", 0.7),
        ("typical", 0.7),
        ("typical-sampled", 0.7),
    ):
        found = [
            answer(
                model, conversation, acceptance=acceptance, temperature=temperature, seed=SEED + i
            )
            for i, conversation in enumerate(prompts)
        ]
        steps = sum(a.stats.steps for a in found)
        emitted = sum(a.stats.emitted for a in found)
        ended = sum(a.reason == "eos" for a in found) / len(found)
        name = f"{acceptance}, temperature {temperature:g}"
        print(f"| {name} | {emitted / steps:.2f} | {ended:.1%} |", flush=True)
        if (acceptance, temperature) == ("exact", 0.7):
            shares = sorted(distinct_4(a.token_ids) for a in found)
    mean, lowest = sum(shares) / len(shares), shares[0]
    loops = sum(share < 0.8 for share in shares)
    print(f"\nDistinct-4 of the {PROMPTS} answers sampled at 0.7 (exact): {mean:.3f} on average, ")
    print(f"{lowest:.2f} the lowest; {loops} of them below 0.8.")


def show_sums(model: LoadedModel, data: Path) -> None:
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    wrong = []
    for user, value, kind in sums(data):
        text = answer(model, [{"role": "user", "content": user}]).text
        found = re.search(r"= *(-?\d+)", text)
        is_right = found is not None and int(found[1]) == value
        asked[kind] += 1
        right[kind] += is_right
        if not is_right:
            wrong.append(f"{user!r} -> {text!r}")
    share = right.total() / asked.total()
    each = ", ".join(f"{kind} {right[kind]} of {asked[kind]}" for kind in "+-x/")
    print(f"\nOne-step sums at temperature 0: {share:.1%} of {asked.total()} right ({each}).")
    for line in wrong[:8]:
        print(f"  wrong: {line}", file=sys.stderr)


def transcript(model: LoadedModel, turns: Sequence[str], seed: int) -> list[Message]:
    """Four turns at temperature 0.7, exact, as the page would have them."""
    conversation: list[Message] = []
    for turn in turns:
        conversation.append({"role": "user", "content": turn})
        text = answer(model, conversation, temperature=0.7, seed=seed).text
        conversation.append({"role": "assistant", "content": text})
    return conversation


def show_transcripts(model: LoadedModel, everything: bool) -> None:
    scripts = json.loads((HERE / "conversations.json").read_text("utf-8"))
    numbers = sorted(random.Random(SEED).sample(range(len(scripts)), SHOWN))
    chosen = range(len(scripts)) if everything else numbers
    for number in chosen:
        print(f"\n**Conversation {number + 1}**\n")
        for message in transcript(model, scripts[number], SEED + number):
            print(f"- {message['role']}: {message['content']}".replace("\n", "\n  "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder with train/ (see README.md)")
    parser.add_argument("--checkpoint", default=str(HERE))
    parser.add_argument(
        "--all-conversations", action="store_true", help="all 40 conversations and nothing else"
    )
    arguments = parser.parse_args()
    model = loaded(arguments.checkpoint)
    if arguments.all_conversations:
        return show_transcripts(model, everything=True)
    show_perplexity(model, arguments.data)
    show_accuracies(model)
    show_speed(model, held_out_prompts(arguments.data))
    show_sums(model, arguments.data)
    show_transcripts(model, everything=False)


if __name__ == "__main__":
    main()
