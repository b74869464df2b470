"""Make the demo's draft model from its own answers: `python assets/demo/draft.py DATA_FOLDER`.

A Llama of 0.6 million parameters with the demo's tokenizer, for `assets/benchmarks/paper/run.py
assisted`: what speculative decoding with a draft model gives where Medusa gives the rest (Medusa,
arXiv 2401.10774, appendix D). The answers are build.py's (`answers.jsonl` in the work folder; they
are made there if they are not). About twelve minutes of one core; stop it and run it again: it goes
on where it was.
"""

import argparse
import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import backbone  # noqa: E402
import build  # noqa: E402
from backbone import Recipe, Stage  # noqa: E402
from tqdm import tqdm  # noqa: E402

from medusa_chat.training.examples import Example, collate, group_by_length  # noqa: E402

SIZE_LIMIT = 1_500_000
SAVED = 300  # steps between two states of the second stage
CARD = """---
license: cc-by-sa-4.0
language: en
library_name: transformers
tags: [speculative-decoding, draft, toy]
---
# The demo's draft model

A Llama of {parameters:.2f} million parameters that foresees the answers of the demo checkpoint in
the folder above, whose tokenizer it shares. It is there to be measured against Medusa
(`python assets/benchmarks/paper/run.py assisted`) and is no use by itself. Made by `draft.py`,
from {answers:,} answers of the demo; its first choice is the demo's token at {right:.1%} of
{labels:,} places of {held_out} greedy answers to held-out prompts.
"""

# The first stage learns whole conversations, prompts too, with backbone.py's training.
DRAFT = Recipe(
    hidden=96,
    layers=2,
    heads=3,
    key_value_heads=1,
    intermediate=288,
    sequence=512,
    rows=4,
    stages=(Stage(1500, 1.0, 0, (), 0.3, 0.0, 1.0, end=0.5),),
)


@dataclass(frozen=True)
class Finish:
    """The second stage: only the answers' tokens are learnt. peak: share of the first stage's
    learning rates that it begins with; they fall to nothing."""

    steps: int = 1200
    tokens: int = 4096
    peak: float = 0.5


def make_answers(data: Path, work: Path) -> tuple[list[Example], list[Example]]:
    """The demo's answers to training prompts and to held-out ones: build.py's own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = Recipe()
    tokenizer = AutoTokenizer.from_pretrained(HERE)
    model = AutoModelForCausalLM.from_pretrained(HERE, dtype=torch.float32).eval()
    rows = build.conversations(data, recipe, len(recipe.stages) - 1)
    return build.all_answers(data, work, model, tokenizer, rows)


def learn_text(model, examples: list[Example], held_out: list[Example], work: Path) -> None:
    """The first stage, taken up where it stopped."""
    rows, unseen = (
        backbone.pack([list(e.ids) for e in part], DRAFT.sequence, 0)
        for part in (examples, held_out)
    )
    state = work / "draft-text.pt"
    bar = tqdm(total=DRAFT.steps, desc="text", unit="step")
    for step, loss, checked in backbone.train(model, [rows], rows, unseen[:32], DRAFT, state):
        bar.update(step - bar.n)
        bar.set_postfix(loss=f"{loss:.3f}")
        if checked is not None:
            bar.write(f"text, step {step}: held-out loss {checked:.3f}", file=sys.stderr)
    bar.close()
    model.load_state_dict(torch.load(state, weights_only=True)["model"])


def batches(examples: list[Example], finish: Finish) -> Iterator[list[Example]]:
    """finish.steps of them, epoch after epoch."""
    epoch, left = 0, finish.steps
    while left:
        groups = group_by_length(examples, finish.tokens, epoch)[:left]
        random.Random(epoch).shuffle(groups)
        yield from groups
        epoch, left = epoch + 1, left - len(groups)


def answer_logits(model, group: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] before each token of the answers, and the tokens [n]."""
    batch = collate(group)
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state[:, :-1]
    chosen = batch.is_label[:, 1:]
    return model.lm_head(hidden[chosen]), batch.ids[:, 1:][chosen]


def learn_answers(model, examples: list[Example], finish: Finish, state: Path) -> None:
    """The second stage, taken up where it was last saved."""
    optimizers = backbone.optimizers(model, DRAFT)
    peaks = [o.param_groups[0]["lr"] for o in optimizers]
    done = backbone.restore_state(state, model, optimizers)
    bar = tqdm(batches(examples, finish), total=finish.steps, desc="answers", unit="step")
    for step, group in enumerate(bar):
        if step < done:
            continue
        share = finish.peak * min((step + 1) / 50, 1 - step / finish.steps)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * share
        loss = F.cross_entropy(*answer_logits(model, group))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        bar.set_postfix(loss=f"{loss.item():.3f}")
        if (step + 1) % SAVED == 0 or step + 1 == finish.steps:
            backbone.save_state(state, model, optimizers, step + 1)


@torch.no_grad()
def right(model, examples: list[Example]) -> tuple[float, int]:
    """How often its first choice is the answer's token, and of how many."""
    hits = count = 0
    for group in group_by_length(examples, 4096, 0):
        logits, wanted = answer_logits(model, group)
        hits += int((logits.argmax(-1) == wanted).sum())
        count += len(wanted)
    return hits / count, count


def publish(model, card: str, output: Path) -> None:
    """bf16 weights and the card in a folder of their own, replaced whole. Refuses a large one."""
    partial = output.with_name(f"{output.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.to(torch.bfloat16).save_pretrained(partial)
    (partial / "README.md").write_text(card, "utf-8")
    for file in partial.iterdir():
        file.chmod(0o644)
    size = sum(file.stat().st_size for file in partial.iterdir())
    if size > SIZE_LIMIT:
        sys.exit(f"the draft has {size:,} bytes, of {SIZE_LIMIT:,}: nothing was published")
    shutil.rmtree(output, ignore_errors=True)
    partial.replace(output)
    print(f"{size:,} bytes in {output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder with train/ (see README.md)")
    parser.add_argument("--work", type=Path, default=HERE / ".build", help="build.py's work folder")
    parser.add_argument("--output", type=Path, default=HERE / "draft")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    examples, held_out = make_answers(arguments.data, arguments.work)
    model = backbone.new_model(DRAFT)
    learn_text(model, examples, held_out, arguments.work)
    learn_answers(model, examples, Finish(), arguments.work / "draft-answers.pt")
    share, labels = right(model.eval(), held_out)
    millions = model.num_parameters() / 1e6
    card = CARD.format(
        parameters=millions,
        answers=len(examples),
        right=share,
        labels=labels,
        held_out=len(held_out),
    )
    print(card)
    publish(model, card, arguments.output)


if __name__ == "__main__":
    main()
