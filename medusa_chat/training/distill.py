"""Self-distillation: the backbone's own answers to prompts, which heads are trained to predict."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from medusa_chat import paths
from medusa_chat.errors import UsageError
from medusa_chat.training.answerers import Answerer
from medusa_chat.training.data import Example
from medusa_chat.training.engine_answerer import PromptBatch


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
    by: str

    @property
    def example(self) -> Example:
        """The prompt and the answer, whose tokens are the labels."""
        is_label = (False,) * len(self.prompt_ids) + (True,) * len(self.answer_ids)
        return Example(self.prompt_ids + self.answer_ids, is_label, f"answer {self.index}")


def answer_prompts(
    answerer: Answerer, prompts: Sequence[Sequence[int]], recipe: DistillRecipe, path: Path
) -> Iterator[Answer]:
    """Answer every prompt (token ids), appended one by one to the JSONL file at `path`.

    Answers that are in the file are yielded first and not made again. The same prompts and recipe
    give the same file, interrupted or not. Raises UsageError for the file of other prompts or of
    another answerer.
    """
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    batches: list[PromptBatch] = []  # of similar lengths
    for start in range(0, len(order), recipe.rows):
        chosen = [prompts[index] for index in order[start : start + recipe.rows]]
        temperature = recipe.temperatures[len(batches) % len(recipe.temperatures)]
        batches.append(PromptBatch(chosen, temperature, recipe.seed + len(batches)))
    kept = _kept(path, order, prompts)
    yield from kept
    if len(kept) == len(prompts):
        return
    if kept and kept[0].by != answerer.name:
        raise UsageError(
            f"{path} was written by {kept[0].by}, and {answerer.name} samples differently: remove "
            "it, or continue on the machine, and by the version, that wrote it"
        )
    found = answerer.answer(batches, recipe.max_new_tokens, len(kept))
    with path.open("a", encoding="utf-8") as file:
        places = range(len(kept), len(order))
        for place, ids in zip(places, found, strict=True):
            index, temperature = order[place], batches[place // recipe.rows].temperature
            prompt = tuple(prompts[index])
            answer = Answer(index, prompt, tuple(ids), temperature, answerer.name)
            file.write(json.dumps(asdict(answer)) + "\n")
            file.flush()
            yield answer


def read_answers(path: Path) -> Iterator[Answer]:
    """The answers of a file, up to a line that is incomplete."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            row = json.loads(line)
        except ValueError:
            return
        ids = (tuple(row["prompt_ids"]), tuple(row["answer_ids"]))
        yield Answer(row["index"], *ids, row["temperature"], row["by"])


def _kept(path: Path, order: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """The answers in the file, which is cut to them: a line may be incomplete where the disk was
    full or the program was killed. order: of the prompts' indices. Raises UsageError."""
    if not path.exists():
        return []
    answers = list(read_answers(path))
    wanted = [(index, tuple(prompts[index])) for index in order[: len(answers)]]
    if [(answer.index, answer.prompt_ids) for answer in answers] != wanted:
        raise UsageError(f"{path} contains the answers to other prompts: remove it")
    lines = path.read_bytes().splitlines(keepends=True)
    if lines[len(answers) :]:
        paths.write_bytes(path, b"".join(lines[: len(answers)]))
    return answers
