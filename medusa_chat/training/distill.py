"""Self-distillation: the backbone's own answers, for heads that must foresee them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from medusa_chat.errors import UsageError
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
    """An answer as token ids, the end token included where the backbone gave one."""

    index: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    temperature: float

    @property
    def example(self) -> Example:
        """The answer's tokens are the labels, the prompt's are not."""
        is_label = (False,) * len(self.prompt_ids) + (True,) * len(self.answer_ids)
        return Example(self.prompt_ids + self.answer_ids, is_label, f"answer {self.index}")


def answer_prompts(
    model: Any, prompts: Sequence[Sequence[int]], recipe: DistillRecipe, path: Path
) -> Iterator[Answer]:
    """Answer every prompt (token ids) in batches, saved to the JSONL file at `path` as it goes.

    Answers that are there already are yielded first and not made again; a batch that was cut off
    is. The same prompts and recipe give the same file, interrupted or not.
    """
    groups = _groups(prompts, recipe.rows)
    kept = _whole_batches(path, groups, prompts)
    yield from (answer for batch in kept for answer in batch)
    with path.open("a", encoding="utf-8") as file:
        for number in range(len(kept), len(groups)):
            temperature = recipe.temperatures[number % len(recipe.temperatures)]
            chosen = [prompts[index] for index in groups[number]]
            texts = _generate(model, chosen, temperature, recipe, recipe.seed + number)
            answers = [
                Answer(index, tuple(prompts[index]), tuple(ids), temperature)
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
        yield Answer(row["index"], *ids, row["temperature"])


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


def _generate(
    model: Any,
    prompts: list[Sequence[int]],
    temperature: float,
    recipe: DistillRecipe,
    seed: int,
) -> list[list[int]]:
    """Answers to a batch, padded on the left; each ends behind its first end token."""
    width = max(map(len, prompts))
    ends = end_ids(model)
    ids = torch.full((len(prompts), width), ends[0])
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.random.fork_rng(devices=_cuda_devices(model)), torch.inference_mode():
        torch.manual_seed(seed)
        output = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=recipe.max_new_tokens,
            eos_token_id=ends,
            pad_token_id=ends[0],
            **(sampling if temperature else {"do_sample": False}),
        )
    return [_until_end(row, set(ends)) for row in output[:, width:].tolist()]


def end_ids(model: Any) -> list[int]:
    """Every end token of the generation config. Raises UsageError when there is none."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        raise UsageError("the backbone's generation config names no end token (eos_token_id)")
    return list(ends) if isinstance(ends, (list, tuple)) else [ends]


def _until_end(ids: list[int], ends: set[int]) -> list[int]:
    for place, token in enumerate(ids):
        if token in ends:
            return ids[: place + 1]
    return ids


def _cuda_devices(model: Any) -> list[int]:
    return [model.device.index or 0] if model.device.type == "cuda" else []
