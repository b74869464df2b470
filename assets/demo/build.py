"""Make the demo checkpoint from nothing: `python assets/demo/build.py DATA_FOLDER`.

Stages, each kept in the (git-ignored) work folder and skipped when it is there already:
tokenizer, tokens, backbone, answers (self-distillation), heads, calibration, checkpoint.
Stop it at any time and run it again: it goes on where it was.
"""

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import backbone  # noqa: E402
import dialogues  # noqa: E402
from backbone import Recipe  # noqa: E402
from tqdm import tqdm  # noqa: E402

from medusa_chat import paths  # noqa: E402
from medusa_chat.checkpoints.head_weights import heads_of, tensors_of  # noqa: E402
from medusa_chat.decoding.heads import MedusaHeads  # noqa: E402
from medusa_chat.errors import MedusaChatError  # noqa: E402
from medusa_chat.training.answerers import fastest_answerer  # noqa: E402
from medusa_chat.training.calibration import accuracies_of, ranks_of  # noqa: E402
from medusa_chat.training.distill import DistillRecipe, answer_prompts  # noqa: E402
from medusa_chat.training.events import HiddenStates, TrainStep  # noqa: E402
from medusa_chat.training.examples import Example, encode_prompt  # noqa: E402
from medusa_chat.training.loss import shortlist  # noqa: E402
from medusa_chat.training.recipe import Recipe as HeadsRecipe  # noqa: E402
from medusa_chat.training.trainer import new_heads, train_heads  # noqa: E402
from medusa_chat.trees.calibration import Calibration  # noqa: E402

SIZE_LIMIT = 24_000_000
PROMPT_TOKENS = 400
CALIBRATION = "medusa_calibration.json"


@dataclass(frozen=True)
class Plan:
    """How the heads are made, once the backbone is there.

    prompts: half of them from the given sets, half from our own dialogues.
    """

    prompts: int = 48_000
    held_out_prompts: int = 300
    answer_tokens: int = 128
    heads: int = 5
    head_layers: int = 2
    head_steps: int = 6000
    head_learning_rate: float = 2e-2
    nodes: int = 64


def conversations(data: Path, recipe: Recipe, number: int) -> list[dict]:
    """A stage's training conversations: the given sets, then our own generated dialogues."""
    stage = recipe.stages[number]
    rows = [
        row
        for name, share in zip(backbone.SETS, stage.shares, strict=True)
        for row in backbone.read_rows(data, name, share)
    ]
    templates = data / "train" / "templates_raw"
    rows += dialogues.generate(templates, stage.dialogues, recipe.seed + 10 * number)
    return rows


def make_tokenizer(work: Path, rows: list[dict], recipe: Recipe):
    """Train the tokenizer once and load it from the work folder afterwards."""
    from transformers import AutoTokenizer

    folder = work / "tokenizer"
    if not folder.exists():
        template = (HERE / "chat_template.jinja").read_text("utf-8")
        texts = (m["content"] for row in rows for m in row["messages"])
        backbone.train_tokenizer(texts, recipe, template).save_pretrained(work / "tokenizer.part")
        (work / "tokenizer.part").replace(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row in random.Random(0).sample(rows, 200):
        assert backbone.render(row["messages"]) == tokenizer.apply_chat_template(
            row["messages"], tokenize=False
        ), "render() and the chat template disagree"
    return tokenizer


def packed(rows: Iterable[dict], tokenizer, recipe: Recipe, seed: int) -> torch.Tensor:
    """Conversations as packed rows [n, sequence + 1] of int16."""
    texts = [backbone.render(row["messages"]) for row in rows]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return backbone.pack(ids, recipe.sequence, seed)


def make_tokens(
    work: Path, rows: list[dict], tokenizer, recipe: Recipe, number: int
) -> torch.Tensor:
    """A stage's packed training rows."""
    path = work / f"tokens-{number}.pt"
    if not path.exists():
        tokens = packed(rows, tokenizer, recipe, recipe.seed)
        torch.save(tokens, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
    return torch.load(path, weights_only=True)


def held_out_conversations(data: Path, recipe: Recipe, sgd: int, own: int) -> list[dict]:
    """Conversations that training never sees: of SGD's dev split and dialogues of another seed."""
    lines = (data / "train/sgd/dev.jsonl").read_text("utf-8").rstrip("\n").split("\n")
    rows = [json.loads(line) for line in lines[:sgd]]
    return rows + list(dialogues.generate(data / "train/templates_raw", own, recipe.seed + 1))


def held_out_rows(data: Path, tokenizer, recipe: Recipe) -> torch.Tensor:
    return packed(held_out_conversations(data, recipe, 80, 150), tokenizer, recipe, 0)


def make_drills(data: Path, tokenizer, recipe: Recipe) -> torch.Tensor:
    """Packed rows of the last steps' drills."""
    rows = dialogues.generate_drills(data / "train/templates_raw", recipe.drills, recipe.seed + 2)
    return packed(rows, tokenizer, recipe, recipe.seed)


def make_backbone(
    work: Path,
    tokens: list[torch.Tensor],
    drills: torch.Tensor,
    held_out: torch.Tensor,
    recipe: Recipe,
) -> None:
    """Train the backbone, or take it up where it stopped."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = backbone.new_model(recipe).to(device)
    log = work / "backbone.log"
    bar = tqdm(total=recipe.steps, desc="backbone", unit="step")
    started = time.monotonic()
    for step, loss, checked in backbone.train(
        model, tokens, drills, held_out, recipe, work / "backbone.pt"
    ):
        bar.update(step - bar.n)
        bar.set_postfix(loss=f"{loss:.3f}")
        if checked is not None:
            with log.open("a") as file:
                file.write(f"{step} {loss:.4f} {checked:.4f} {time.monotonic() - started:.0f}\n")
    bar.close()


def saved_backbone(work: Path, recipe: Recipe):
    """The trained model in eval mode on the CPU or GPU."""
    saved = torch.load(work / "backbone.pt", weights_only=True)
    model = backbone.new_model(recipe)
    model.load_state_dict(saved["model"])
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def prompts_of(
    rows: list[dict], tokenizer, count: int, seed: int, known: Sequence[list[int]] = ()
) -> list[list[int]]:
    """`count` different prompts, none of them known: conversations cut before a random answer."""
    chance = random.Random(seed)
    refused = {tuple(prompt) for prompt in known}
    prompts: dict[tuple[int, ...], None] = {}
    for row in chance.sample(rows, len(rows)):
        turns = [i for i, m in enumerate(row["messages"]) if m["role"] == "assistant"]
        ids = tuple(encode_prompt(tokenizer, row["messages"][: chance.choice(turns)]))
        if len(ids) <= PROMPT_TOKENS and ids not in refused:
            prompts[ids] = None
        if len(prompts) == count:
            break
    return [list(prompt) for prompt in prompts]


def make_prompts(
    data: Path, rows: list[dict], tokenizer, recipe: Recipe, plan: Plan
) -> tuple[list[list[int]], list[list[int]]]:
    """(held-out prompts, those of the last stage's rows: half of the sets, half of our own)."""
    unseen = held_out_conversations(data, recipe, 400, 400)
    asked = prompts_of(unseen, tokenizer, plan.held_out_prompts, recipe.seed)
    prompts: list[list[int]] = []
    for part in (rows[: -recipe.stages[-1].dialogues], rows[-recipe.stages[-1].dialogues :]):
        prompts += prompts_of(part, tokenizer, plan.prompts // 2, recipe.seed, known=asked)
    return asked, prompts


def make_answers(
    model, prompts: list[list[int]], recipe: DistillRecipe, path: Path
) -> list[Example]:
    """The backbone's answers to the prompts, as training examples."""
    ends = (model.generation_config.eos_token_id,)
    context = PROMPT_TOKENS + recipe.max_new_tokens + 1
    answers = answer_prompts(fastest_answerer(model, context, ends), prompts, recipe, path)
    bar = tqdm(answers, total=len(prompts), desc=path.stem, unit="answer")
    longer = (answer for answer in bar if len(answer.answer_ids) > 2)
    return [answer.example(f"answer {answer.index}") for answer in longer]


def all_answers(
    data: Path, work: Path, model, tokenizer, rows: list[dict]
) -> tuple[list[Example], list[Example]]:
    """The answers to prompts of the last stage's rows, sampled and greedy in turn, and to held-out
    ones, greedy."""
    plan = Plan()
    asked, prompts = make_prompts(data, rows, tokenizer, Recipe(), plan)
    greedy = DistillRecipe(plan.answer_tokens, temperatures=(0.0,))
    held_out = make_answers(model, asked, greedy, work / "held_out_answers.jsonl")
    sampled = DistillRecipe(plan.answer_tokens)
    return make_answers(model, prompts, sampled, work / "answers.jsonl"), held_out


def make_heads(
    work: Path, model, examples: list[Example], held_out: list[Example], plan: Plan
) -> MedusaHeads:
    """Heads that share the LM head, trained once on the backbone's own answers."""
    path = work / "heads.safetensors"
    if not path.exists():
        heads = new_heads(model.lm_head, plan.heads, plan.head_layers)
        recipe = HeadsRecipe(
            max_steps=plan.head_steps,
            batch_tokens=4096,
            learning_rate=plan.head_learning_rate,
            head_learning_rate_multiplier=1.0,
        )
        events = train_heads(
            model, model.lm_head, heads, examples, recipe, held_out, work / "heads.pt"
        )
        bar = tqdm(total=recipe.steps, desc="heads", unit="step")
        for event in events:
            if isinstance(event, HiddenStates):
                continue
            top1 = " ".join(f"{share:.2f}" for share, *_ in event.top)
            if isinstance(event, TrainStep):
                bar.update(event.step - bar.n)
                bar.set_postfix(loss=f"{event.loss:.3f}", top1=top1)
            else:
                bar.write(f"heads, step {event.step}: held-out top-1 {top1}", file=sys.stderr)
        bar.close()
        save_file(tensors_of(heads.to("cpu", torch.bfloat16)), path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
    return heads_of(load_file(path)).float().to(model.device)


def make_calibration(
    work: Path,
    model,
    heads: MedusaHeads,
    answers: list[Example],
    held_out: list[Example],
    plan: Plan,
) -> dict:
    """Rank accuracies on held-out greedy answers, the tree that these answers ask for, and the
    tokens that most of all answers are made of."""
    path = work / CALIBRATION
    if not path.exists():
        told = tqdm(held_out, desc="calibration", unit="answer")
        ranks = [rows for example in told for rows in ranks_of(model, heads, example)]
        accuracies, labels = accuracies_of(ranks, len(heads))
        what = f"{len(held_out)} greedy answers of the backbone to held-out prompts"
        found = Calibration.search(accuracies, plan.nodes, what, labels[0], ranks)
        listed = shortlist((one.labels for one in answers), model.config.vocab_size)
        paths.write_text(path, json.dumps(replace(found, shortlist=listed).to_json()) + "\n")
    return json.loads(path.read_text("utf-8"))


def make_checkpoint(work: Path, model, tokenizer) -> Path:
    """A stock Hugging Face folder in bf16 with the heads and the calibration beside it."""
    folder, partial = work / "checkpoint", work / "checkpoint.part"
    if folder.exists():
        return folder
    shutil.rmtree(partial, ignore_errors=True)
    # a copy: the model that was passed stays in fp32
    deepcopy(model).to("cpu", torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    ends = sorted({tokenizer.eos_token_id, model.config.eos_token_id})
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(partial)
    shutil.copyfile(work / "heads.safetensors", partial / "medusa_lm_head.safetensors")
    shutil.copyfile(work / CALIBRATION, partial / CALIBRATION)
    partial.replace(folder)
    return folder


def publish(folder: Path, output: Path) -> None:
    """Copy the checkpoint's files into `output`, each at once. Refuses one that is too large."""
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    for name, size in sizes.items():
        print(f"{size:>12,} {name}")
    total = sum(sizes.values())
    print(f"{total:>12,} bytes in all, of {SIZE_LIMIT:,}")
    if total > SIZE_LIMIT:
        sys.exit(f"the checkpoint is {total - SIZE_LIMIT:,} bytes too large: nothing was published")
    output.mkdir(parents=True, exist_ok=True)
    for name in sizes:
        shutil.copyfile(folder / name, output / f"{name}.part")
        (output / f"{name}.part").replace(output / name)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder with train/ (see README.md)")
    parser.add_argument("--work", type=Path, default=HERE / ".build", help="resumable state")
    parser.add_argument("--output", type=Path, default=HERE)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    recipe, plan = Recipe(), Plan()
    arguments.work.mkdir(parents=True, exist_ok=True)
    hashes = backbone.data_hashes(arguments.data)
    shown = {"recipe": asdict(recipe), "heads": asdict(plan), "data": hashes}
    print(json.dumps(shown, indent=1))
    texts = [conversations(arguments.data, recipe, n) for n in range(len(recipe.stages))]
    tokenizer = make_tokenizer(arguments.work, texts[0], recipe)
    tokens = [
        make_tokens(arguments.work, text, tokenizer, recipe, number)
        for number, text in enumerate(texts)
    ]
    held_out = held_out_rows(arguments.data, tokenizer, recipe)
    for part in tokens:
        print(f"{len(part) * recipe.sequence:,} training tokens", file=sys.stderr)
    drills = make_drills(arguments.data, tokenizer, recipe)
    make_backbone(arguments.work, tokens, drills, held_out, recipe)
    model = saved_backbone(arguments.work, recipe)
    finish(arguments, model, tokenizer, texts[-1], recipe, plan)


def finish(arguments, model, tokenizer, rows: list[dict], recipe: Recipe, plan: Plan) -> None:
    """Everything after the backbone: answers, heads, calibration, checkpoint."""
    work = arguments.work
    answers, held_out = all_answers(arguments.data, work, model, tokenizer, rows)
    heads = make_heads(work, model, answers, held_out, plan)
    calibration = make_calibration(work, model, heads, answers, held_out, plan)
    report(calibration)
    publish(make_checkpoint(work, model, tokenizer), arguments.output)


def report(calibration: dict) -> None:
    """Print what the calibration promises."""
    accuracies = calibration["accuracies"]
    for head, row in enumerate(accuracies):
        print(f"head {head}: top-1 {row[0]:.3f}, top-5 {sum(row[:5]):.3f}")
    for nodes, rate in calibration["tokens_per_step"].items():
        print(f"{nodes:>3} nodes: {rate:.2f} tokens a step of the held-out answers")


if __name__ == "__main__":
    try:
        main()
    except MedusaChatError as error:
        sys.exit(str(error))
