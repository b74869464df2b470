"""Self-distillation: the backbone's own answers to prompts, which heads are trained to predict."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from medusa_chat.errors import UsageError
from medusa_chat.training.answerers import Answerer
from medusa_chat.training.data import Example


@dataclass(frozen=True)
class DistillRecipe:
    """How prompts are answered. temperatures: used in turn, one a batch; 0 is greedy. rows: prompts
    of a batch.

    Plain decoding alone is used: typical acceptance would bias the answers (Medusa, arXiv
    2401.10774, 2.3.2).
    """

    max_new_tokens: int = 96
    temperatures: tuple[float, ...] = (0.3, 0.0)
    rows: int = 16
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """An answer as token ids, with its end token. index: of the prompt. by: the name of the
    answerer that gave it."""

    index: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    temperature: float
    by: str = ""

    @property
    def example(self) -> Example:
        """The prompt and the answer, whose tokens are the labels."""
        is_label = (False,) * len(self.prompt_ids) + (True,) * len(self.answer_ids)
        return Example(self.prompt_ids + self.answer_ids, is_label, f"answer {self.index}")


def answer_prompts(
    answerer: Answerer, prompts: Sequence[Sequence[int]], recipe: DistillRecipe, path: Path
) -> Iterator[Answer]:
    """Answer every prompt (token ids) in batches, appended to the JSONL file at `path`.

    Answers that are in the file are yielded first and not made again; an incomplete batch is. The
    same prompts and recipe give the same file, interrupted or not. Raises UsageError for the file
    of other prompts or of another answerer.
    """
    groups = _groups(prompts, recipe.rows)
    kept = _whole_batches(path, groups, prompts)
    yield from (answer for batch in kept for answer in batch)
    if len(kept) < len(groups) and kept and kept[0][0].by != answerer.name:
        raise UsageError(
            f"{path} was written by {kept[0][0].by or 'an older version'}, and {answerer.name} "
            "samples differently: remove it, or continue on the machine that wrote it"
        )
    with path.open("a", encoding="utf-8") as file:
        for number in range(len(kept), len(groups)):
            answers = _answer_group(answerer, prompts, groups[number], recipe, number)
            file.write("".join(json.dumps(asdict(answer)) + "\n" for answer in answers))
            file.flush()
            yield from answers


def _answer_group(
    answerer: Answerer,
    prompts: Sequence[Sequence[int]],
    group: Sequence[int],
    recipe: DistillRecipe,
    number: int,
) -> list[Answer]:
    """Answer the prompts whose indices are in `group`, the batch of this number."""
    temperature = recipe.temperatures[number % len(recipe.temperatures)]
    chosen = [prompts[index] for index in group]
    found = answerer.answer(chosen, temperature, recipe.max_new_tokens, recipe.seed + number)
    return [
        Answer(index, tuple(prompts[index]), tuple(ids), temperature, answerer.name)
        for index, ids in zip(group, found, strict=True)
    ]


def read_answers(path: Path) -> Iterator[Answer]:
    """The answers of a file, without a last line that is incomplete."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        row = json.loads(line)
        ids = (tuple(row["prompt_ids"]), tuple(row["answer_ids"]))
        yield Answer(row["index"], *ids, row["temperature"], row.get("by", ""))


def _groups(prompts: Sequence[Sequence[int]], rows: int) -> list[list[int]]:
    """Indices of prompts of similar lengths, `rows` in a group."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    return [order[start : start + rows] for start in range(0, len(order), rows)]


def _whole_batches(
    path: Path, groups: list[list[int]], prompts: Sequence[Sequence[int]]
) -> list[list[Answer]]:
    """The batches that are complete in the file; the file is cut to them. Raises UsageError."""
    if not path.exists():
        return []
    answers = list(read_answers(path))
    batches, start = [], 0
    for group in groups:
        batch = answers[start : start + len(group)]
        if len(batch) < len(group):
            break
        if [(a.index, a.prompt_ids) for a in batch] != [(i, tuple(prompts[i])) for i in group]:
            raise UsageError(f"{path} contains the answers to other prompts: remove it")
        batches.append(batch)
        start += len(group)
    lines = path.read_bytes().split(b"\n")
    if len(lines) > start + 1 or lines[-1]:  # split() gives one part more than there are lines
        partial = path.with_suffix(".part")
        partial.write_bytes(b"".join(line + b"\n" for line in lines[:start]))
        partial.replace(path)
    return batches
