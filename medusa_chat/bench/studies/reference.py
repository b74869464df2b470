"""Study "reference": the paper's own code beside ours, with the same weights, heads and tree.

The code is a checkout of https://github.com/FasterDecoding/Medusa that the user names; none of it
is here. It was written for transformers 4.34: the few names that are gone since are given back.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from warnings import catch_warnings, simplefilter

from medusa_chat.bench.harness.answers import (
    Answerer,
    Way,
    answer,
    per_step,
    questions,
    rotate,
    speed,
)
from medusa_chat.bench.harness.context import BenchContext
from medusa_chat.bench.harness.hf_baseline import HFBaseline, same_precision
from medusa_chat.bench.harness.report_data import Question, Run
from medusa_chat.bench.harness.rows import Row, unmeasured
from medusa_chat.bench.studies.paper import GREEDY, auto
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import UsageError
from medusa_chat.trees.auto_tree import source_tree

CLASSES = {"llama": "MedusaModelLlama", "mistral": "MedusaModelMistral"}
SIZES = (16, 64)  # nodes of the trees that both decode with
WIDEST = 10  # predictions of a head that the reference looks at
COMMAND = "medusa-chat bench --study reference --reference DIR"


def reference(course: BenchContext) -> Iterator[Row]:
    """Tokens a step and a second of the reference's `medusa_generate` and of our engine with the
    same tree, greedy, prefill left out; and of our plain decoding and our own choice of tree."""
    stock = same_precision(course)
    why = _refusal(course, stock)
    if why or stock is None or course.reference is None:
        yield unmeasured("medusa / the reference", "tokens/s", why)
        return
    theirs = Theirs(course.reference, course, stock)
    source = source_tree(course.loaded.calibration, course.loaded.info.heads)
    shapes = [source.head(min(size, len(source))) for size in SIZES]
    shapes = [tree for tree in shapes if tree.width <= WIDEST]
    ways: dict[str, Answerer] = {
        "plain": partial(answer, course, way=Way(GREEDY)),
        "medusa, --tree auto": partial(answer, course, way=Way(GREEDY, auto(course))),
    }
    for tree in shapes:
        ways[f"the reference, {len(tree)} nodes"] = partial(theirs.play, tree)
        ways[f"medusa, {len(tree)} nodes"] = partial(answer, course, way=Way(GREEDY, tree))
    plays = rotate(course, questions(course), ways)
    for tree in shapes:
        base, mine = f"the reference, {len(tree)} nodes", f"medusa, {len(tree)} nodes"
        same = sum(a.tokens == b.tokens for a, b in zip(plays[base], plays[mine], strict=True))
        note = f"{same} of {len(plays[base])} answers are the same"
        yield per_step(base, plays[base], COMMAND)
        yield per_step(mine, plays[mine], COMMAND, note)
        for name in (base, mine, "medusa, --tree auto", "plain"):
            yield speed(f"{name}: speed", plays[name], plays[base], COMMAND, base)


def _refusal(course: BenchContext, stock: HFBaseline | None) -> str:
    """Why the reference cannot be timed, "" where it can."""
    if course.reference is None:
        return "needs --reference DIR, a checkout of FasterDecoding/Medusa"
    if stock is None:
        return f"the reference was not run at {course.loaded.info.precision}"
    config = stock.model.config
    if config.model_type not in CLASSES:
        return f"the reference knows no {config.model_type}, only llama and mistral"
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    return "" if rope == "default" else f"the reference knows no {rope} rope"


class Theirs:
    """The reference's model with the weights of the stock model and our heads."""

    def __init__(self, folder: Path, course: BenchContext, stock: HFBaseline) -> None:
        """Raises UsageError where `folder` is no checkout of it."""
        heads = course.loaded.engine.heads
        assert heads is not None
        course.progress("loading: the reference")
        self._stock = stock
        self._text = _Text(stock)
        with _importable(folder):
            self._code = import_module("medusa.model.medusa_model")
            family = getattr(self._code, CLASSES[stock.model.config.model_type])
            self._model = _model(family, stock, heads, self._text)
            own = _heads(heads, stock.model.get_output_embeddings().weight)
            self._model.load_state_dict(stock.model.state_dict() | own)
        self._model.to(device=stock.model.device, dtype=stock.model.dtype).eval()
        self._prefill = self._code.initialize_medusa
        self._code.initialize_medusa = self._prefilled
        self._started = 0.0

    def _prefilled(self, *asked: Any) -> Any:
        made = self._prefill(*asked)
        self._started = perf_counter()
        return made

    def play(self, tree: Tree, question: Question) -> Run | None:
        """One greedy answer of its generator, whose text is not decoded; None without room."""
        import torch

        ids = torch.tensor([question.ids], device=self._stock.model.device)
        most = min(self._stock.max_new_tokens, self._stock.context - len(question.ids) - len(tree))
        if most < 1:
            return None
        steps, tokens = 0, []
        with torch.inference_mode():
            choices = [list(choice) for choice in tree.choices[1:]]
            for _ in self._model.medusa_generate(ids, temperature=0.0, medusa_choices=choices):
                steps, tokens = steps + 1, self._text.seen
                if len(tokens) >= most or self._stock.ends & set(tokens):
                    break
        seconds = perf_counter() - self._started
        return Run(question, self._cut(tokens, most), steps, float(len(tokens)), seconds)

    def _cut(self, tokens: list[int], most: int) -> tuple[int, ...]:
        ends = (i for i, token in enumerate(tokens) if token in self._stock.ends)
        return tuple(tokens[: min(most, next(ends, most))])


class _Text:
    """Stands where the reference decodes the whole answer at each step: takes note of its ids."""

    eos_token_id = -1  # what ends an answer is looked at by who asked for it

    def __init__(self, stock: HFBaseline) -> None:
        self.seen: list[int] = []

    def decode(self, ids: Any, **options: Any) -> str:
        """Nothing: text costs both the same."""
        self.seen = ids.tolist()
        return ""


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Where `medusa` is the checkout's, and transformers has what it asks for and is silent of how
    it is used. Raises UsageError."""
    import transformers.utils
    from transformers.utils import logging

    if not (folder / "medusa" / "model" / "medusa_model.py").is_file():
        raise UsageError(
            f"{folder} is no checkout of FasterDecoding/Medusa: it has no medusa/model"
        )
    if not hasattr(transformers.utils, "is_flash_attn_available"):
        transformers.utils.is_flash_attn_available = lambda: False
    level = logging.get_verbosity()
    sys.path.insert(0, str(folder))
    try:
        logging.set_verbosity_error()
        with catch_warnings():
            simplefilter("ignore", FutureWarning)
            yield
    except (ImportError, AttributeError, TypeError) as error:
        raise UsageError(f"the reference does not run with this transformers: {error}") from error
    finally:
        logging.set_verbosity(level)
        sys.path.remove(str(folder))
        for name in [n for n in sys.modules if n.partition(".")[0] == "medusa"]:
            del sys.modules[name]


def _model(family: Any, stock: HFBaseline, heads: MedusaHeads, text: _Text) -> Any:
    """Its model for this configuration, with heads of as many residual layers as ours: it would
    make one and use it for all."""
    from torch import nn

    config = type(stock.model.config)(**stock.model.config.to_dict())
    layers, count, size, _ = heads.weight.shape
    rope = config.rope_parameters or {}
    asked = {
        "medusa_num_heads": 0,
        "medusa_num_layers": layers,
        "pretraining_tp": 1,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": None,
        "_flash_attn_2_enabled": False,
        "_name_or_path": "",
    }
    for name, value in asked.items():
        setattr(config, name, value)
    family._tied_weights_keys = None
    code = sys.modules[family.__module__]
    code.AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: text)
    model = family(config)
    model.medusa = count
    model.medusa_head = nn.ModuleList(
        nn.Sequential(
            *(code.ResBlock(size) for _ in range(layers)),
            nn.Linear(size, config.vocab_size, bias=False),
        )
        for _ in range(count)
    )
    return model


def _heads(heads: MedusaHeads, lm_head: Any) -> dict[str, Any]:
    """Our heads by the names in its model, each with an LM head of its own."""
    last = f"{heads.weight.shape[0]}.weight"
    found = {f"{number}.{last}": lm_head.detach() for number in range(len(heads))}
    return {f"medusa_head.{name}": tensor for name, tensor in (found | heads.to_tensors()).items()}
