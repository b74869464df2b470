"""Questions that a backbone writes itself, as JSONL: it continues the chat template where a user's
first message begins. The same arguments give the same questions on the same kind of machine.

    python assets/heads/questions.py BACKBONE COUNT [--seed N] > questions.jsonl

BACKBONE: a Hub id, a folder or a GGUF file, read in bf16. Questions without an end within 96
tokens, shorter than four words, or seen before are left out.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from medusa_chat.training.answerers import answerer_of
from medusa_chat.training.distill import DistillRecipe, answer_prompts, question_prompt
from medusa_chat.training.process_group import ALONE
from medusa_chat.training.recipe import Recipe, TrainRequest
from medusa_chat.training.setup import TrainingSetup, prepare_setup

TOKENS = 96
TEMPERATURE = 0.9
FEWEST_WORDS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backbone")
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    wish = parser.parse_args()
    setup = read(TrainRequest(wish.backbone, (), Path("unused"), Recipe(), precision="bf16"))
    seen: set[str] = set()
    for text in questions(setup, wish.count, wish.seed):
        if len(text.split()) >= FEWEST_WORDS and text.lower() not in seen:
            seen.add(text.lower())
            print(json.dumps({"prompt": text}, ensure_ascii=False), flush=True)
    print(f"{len(seen)} of {wish.count} questions kept", file=sys.stderr)


def read(request: TrainRequest) -> TrainingSetup:
    steps = prepare_setup(request, ALONE)
    try:
        while True:
            print(next(steps).name, file=sys.stderr)
    except StopIteration as end:
        setup: TrainingSetup = end.value
    setup.read_model()
    return setup


def questions(setup: TrainingSetup, count: int, seed: int) -> Iterator[str]:
    """The texts of the questions that came to their end."""
    answerer = answerer_of(setup)
    start = question_prompt(setup.tokenizer, [])
    if start is None:
        raise SystemExit("the chat template does not write the user's text as it is")
    recipe = DistillRecipe(max_new_tokens=TOKENS, temperatures=(TEMPERATURE,), seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "questions.jsonl")
        for answer in answer_prompts(answerer, [start] * count, recipe, file):
            if answer.answer_ids[-1] in answerer.ends:
                yield str(
                    setup.tokenizer.decode(answer.answer_ids, skip_special_tokens=True)
                ).strip()


if __name__ == "__main__":
    main()
