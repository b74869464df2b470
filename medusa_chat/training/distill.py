"""Self-distillation: the backbone's own answers, for heads that must foresee them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from medusa_chat.errors import UsageError
from medusa_chat.training.answerers import Answerer
from medusa_chat.training.data import Example


@dataclass(frozen=True)
class DistillRecipe:
    """How prompts are answered. temperatures: one a batch in turn, 0 is greedy.

    Plain decoding only: typical acceptance would bias the set (Medusa, arXiv 2401.10774, 2.3.2).
    """

    max_new_tokens: int = 96
    temperatures: tuple[float, ...] = (0.3, 0.0)
    rows: int = 16
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """An answer as token ids, the end token included where the backbone gave one. by: the way it
    was made (Answerer.name)."""

    index: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    temperature: float
    by: str = ""

    @property
    def example(self) -> Example:
        """The answer's tokens are the labels, the prompt's are not."""
        is_label = (False,) * len(self.prompt_ids) + (True,) * len(self.answer_ids)
        return Example(self.prompt_ids + self.answer_ids, is_label, f"answer {self.index}")


def answer_prompts(
    answerer: Answerer, prompts: Sequence[Sequence[int]], recipe: DistillRecipe, path: Path
) -> Iterator[Answer]:
    """Answer every prompt (token ids) in batches, saved to the JSONL file at `path` as it goes.

    Answers that are there already are yielded first and not made again; a batch that was cut off
    is. The same prompts and recipe give the same file, interrupted or not. Raises UsageError for a
    file of other prompts, or that was begun by who samples otherwise.
    """
    groups = _groups(prompts, recipe.rows)
    kept = _whole_batches(path, groups, prompts)
    yield from (answer for batch in kept for answer in batch)
    if len(kept) < len(groups) and kept and kept[0][0].by != answerer.name:
        raise UsageError(
            f"{path} was begun by {kept[0][0].by or 'an older version'}, and {answerer.name} would "
            "go on: remove it, or go on where it was begun"
        )
    with path.open("a", encoding="utf-8") as file:
        for number in range(len(kept), len(groups)):
            temperature = recipe.temperatures[number % len(recipe.temperatures)]
            chosen = [prompts[index] for index in groups[number]]
            seed = recipe.seed + number
            texts = answerer.answer(chosen, temperature, recipe.max_new_tokens, seed)
            answers = [
                Answer(index, tuple(prompts[index]), tuple(ids), temperature, answerer.name)
                for index, ids in zip(groups[number], texts, strict=True)
            ]
            file.write("".join(json.dumps(asdict(answer)) + "\n" for answer in answers))
            file.flush()
            yield from answers


def read_answers(path: Path) -> Iterator[Answer]:
    """Answers of a file, up to the first line that was not written whole."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        row = json.loads(line)
        ids = (tuple(row["prompt_ids"]), tuple(row["answer_ids"]))
        yield Answer(row["index"], *ids, row["temperature"], row.get("by", ""))


def _groups(prompts: Sequence[Sequence[int]], rows: int) -> list[list[int]]:
    """Indices of prompts of like lengths, `rows` at a time."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    return [order[start : start + rows] for start in range(0, len(order), rows)]


def _whole_batches(
    path: Path, groups: list[list[int]], prompts: Sequence[Sequence[int]]
) -> list[list[Answer]]:
    """Batches that are complete in the file, which is cut to them. Raises UsageError."""
    if not path.exists():
        return []
    answers = list(read_answers(path))
    batches, start = [], 0
    for group in groups:
        batch = answers[start : start + len(group)]
        if len(batch) < len(group):
            break
        if [(a.index, a.prompt_ids) for a in batch] != [(i, tuple(prompts[i])) for i in group]:
            raise UsageError(f"{path} answers other prompts: remove it or give another file")
        batches.append(batch)
        start += len(group)
    lines = path.read_bytes().split(b"\n")
    if len(lines) > start + 1 or lines[-1]:  # the last one is what follows the last line's end
        partial = path.with_suffix(".part")
        partial.write_bytes(b"".join(line + b"\n" for line in lines[:start]))
        partial.replace(path)
    return batches
