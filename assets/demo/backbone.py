"""The demo's tokenizer and backbone: a byte-level BPE and a small Llama, trained from nothing."""

import hashlib
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from medusa_chat.training.trainer import Muon, write_state

SPECIAL = ["<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
PLACEHOLDER = re.compile(r"\[(name|user|your|city)[^]]*\]", re.IGNORECASE)

# folder -> files; every HELD_OUT-th row is never trained on
HELD_OUT = 40
SETS = {
    "sgd": ["train.jsonl"],
    "taskmaster": ["tm4_coffee.jsonl", "tm3_movies.jsonl"],
    "synthetic_persona_chat": ["valid.jsonl", "test.jsonl"],
    "stories": ["pratham_en.jsonl", "african_storybook_en_ccby.jsonl"],
    "chatterbot": ["train.jsonl"],
    "personality_chat_mit": ["train.jsonl"],
}


@dataclass(frozen=True)
class Stage:
    """A stretch of the training with its own text and its own learning rate schedule.

    peak: share of the recipe's learning rates at its height; end: share of that peak at its end.
    shares: how often each set's rows come in one pass, in the order of SETS. The `from`s are shares
    of the stage's steps.
    """

    steps: int
    peak: float
    dialogues: int
    shares: tuple[float, ...]
    decay_from: float
    whole_rows_from: float
    drills_from: float
    end: float = 0.0


STAGES = (
    Stage(4000, 1.0, 60_000, (0.45, 1.0, 0.4, 0.5, 1.0, 2.0), 0.2, 0.65, 0.85),
    Stage(1300, 0.5, 30_000, (1.0, 0.5, 0.2, 0.3, 0.5, 1.0), 9 / 130, 1.0, 1.0, end=0.7256),
    Stage(2000, 0.363, 30_000, (1.0, 0.5, 0.2, 0.3, 0.5, 1.0), 0.0, 0.3, 0.7),
)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the backbone's weights, but for the data itself."""

    vocabulary: int = 4096
    hidden: int = 192
    layers: int = 6
    heads: int = 6
    key_value_heads: int = 2
    intermediate: int = 576
    context: int = 1024
    sequence: int = 1024
    rows: int = 2
    learning_rate: float = 3e-3
    matrix_learning_rate: float = 5e-3
    drills: int = 9000
    stages: tuple[Stage, ...] = STAGES
    seed: int = 0

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def stage_at(self, step: int) -> tuple[int, int]:
        """(number of the stage, step within it) of a step of the whole training."""
        for number, stage in enumerate(self.stages):
            if step < stage.steps:
                return number, step
            step -= stage.steps
        raise ValueError(f"the recipe has {self.steps} steps")


def read_rows(
    folder: Path, name: str, share: float = 1.0, held_out: bool = False
) -> Iterator[dict]:
    """Rows of one set, placeholders dropped; yields {"source", "messages"}.

    held_out: each row that training never sees, once; else the others, each `share` times.
    """
    keep = random.Random(name)
    for file in SETS[name]:
        text = (folder / "train" / name / file).read_text("utf-8")
        for index, line in enumerate(text.rstrip("\n").split("\n")):
            row = {"source": name, "messages": json.loads(line)["messages"]}
            if any(PLACEHOLDER.search(m["content"]) for m in row["messages"]):
                continue
            if held_out != (index % HELD_OUT == 0):
                continue
            for _ in range(1 if held_out else int(share) + (keep.random() < share % 1)):
                yield row


def data_hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file read, so that a build can be compared with another."""
    return {
        f"{name}/{file}": hashlib.sha256((folder / "train" / name / file).read_bytes()).hexdigest()
        for name, files in SETS.items()
        for file in files
    }


def train_tokenizer(texts: Iterator[str], recipe: Recipe, template: str):
    """A byte-level BPE that keeps digits apart, as a transformers tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|begin|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL[3:],
        model_max_length=recipe.context,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def render(messages: list[dict]) -> str:
    """One conversation as the chat template writes it (checked against it by build.py)."""
    return "<|begin|>" + "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages)


def pack(conversations: list[list[int]], length: int, seed: int) -> torch.Tensor:
    """Conversations joined into rows [n, length + 1], each row starting with a conversation."""
    order = list(range(len(conversations)))
    random.Random(seed).shuffle(order)
    rows, row = [], []
    for index in order:
        row += conversations[index]
        if len(row) > length:
            rows.append(row[: length + 1])
            row = []
    return torch.tensor(rows, dtype=torch.int16)


def new_model(recipe: Recipe):
    """A Llama with tied embeddings and random weights."""
    from transformers import LlamaForCausalLM

    from medusa_chat.bench.random_model import RandomModel, llama_config

    shape = RandomModel(
        *("demo", recipe.hidden, recipe.intermediate, recipe.layers, recipe.heads),
        *(recipe.key_value_heads, recipe.vocabulary, recipe.context),
    )
    pad, begin, end = map(SPECIAL.index, ("<|pad|>", "<|begin|>", "<|end|>"))
    marks = {"pad_token_id": pad, "bos_token_id": begin, "eos_token_id": end}
    torch.manual_seed(recipe.seed)
    return LlamaForCausalLM(llama_config(shape, tie_word_embeddings=True, **marks))


def rate(step: int, stage: Stage) -> float:
    """Share of the learning rate: warm up, hold the stage's peak, then fall linearly to its end."""
    start = stage.decay_from * stage.steps
    fallen = max(0.0, (step - start) / (stage.steps - start))
    return stage.peak * min(1.0, (step + 1) / 50, 1 - (1 - stage.end) * fallen)


def optimizers(model, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        Muon(matrices, lr=recipe.matrix_learning_rate),
        torch.optim.AdamW(rest, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def loss_of(model, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token over rows [b, length + 1]."""
    rows = rows.long()
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.device.type == "cuda"):
        hidden = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def train(
    model,
    rows_of_stages: list[torch.Tensor],
    drills: torch.Tensor,
    held_out: torch.Tensor,
    recipe: Recipe,
    state: Path,
):
    """Train to recipe.steps, resuming from `state`; yields (step, loss, held-out loss or None).

    drills: rows that take the second half of every batch from the stage's drills_from on.
    """
    optimizer_list = optimizers(model, recipe)
    peaks = [o.param_groups[0]["lr"] for o in optimizer_list]
    step = restore_state(state, model, optimizer_list)
    device = next(model.parameters()).device
    while step < recipe.steps:
        number, at = recipe.stage_at(step)
        stage, rows = recipe.stages[number], rows_of_stages[number]
        epoch, offset = divmod(at * recipe.rows, len(rows) - recipe.rows)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
        batch = rows[order[offset : offset + recipe.rows]].to(device)
        if at < stage.whole_rows_from * stage.steps:
            batch = halves(batch)
        if at >= stage.drills_from * stage.steps:
            batch[-1] = drills[step % len(drills)]
        for optimizer, peak in zip(optimizer_list, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate(at, stage)
        loss = loss_of(model, batch)
        loss.backward()
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"the loss is not finite at step {step}")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizer_list:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        checked = step % 100 == 0 or step == recipe.steps
        if checked:
            save_state(state, model, optimizer_list, step)
        yield step, loss.item(), evaluate(model, held_out) if checked else None


def halves(rows: torch.Tensor) -> torch.Tensor:
    """Rows [b, 2n + 1] as [2b, n + 1]: attention costs half; whole rows come at the end."""
    middle = rows.shape[1] // 2
    return torch.cat([rows[:, : middle + 1], rows[:, middle:]])


def evaluate(model, rows: torch.Tensor) -> float:
    """Mean loss over held-out rows, four at a time."""
    device = next(model.parameters()).device
    with torch.no_grad():
        return sum(loss_of(model, r.to(device)).item() for r in rows.split(4)) / len(rows.split(4))


def restore_state(path: Path, model, optimizer_list) -> int:
    """Take up what `save_state` wrote; the number of steps that are done, 0 without a file."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    for optimizer, values in zip(optimizer_list, saved["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    return saved["step"]


def save_state(path: Path, model, optimizer_list, step: int) -> None:
    """Write the whole training state, whole or not at all."""
    saved = {
        "model": model.state_dict(),
        "optimizers": [o.state_dict() for o in optimizer_list],
        "step": step,
    }
    write_state(path, saved)
