"""Study "reference": the paper's own code against ours, with the same weights, heads and tree.

The code is a checkout of https://github.com/FasterDecoding/Medusa that the user names; none of it
is here. It was written for transformers 4.34: the few names that are missing today are provided.
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

import torch
import transformers.utils
from figures import GREEDY
from paper_context import PaperContext
from torch import nn
from transformers.utils import logging

from medusa_chat.bench.answers import (
    AnswerFunction,
    Question,
    Run,
    Variant,
    answer,
    per_step,
    questions,
    rotate,
    speed,
)
from medusa_chat.bench.hf_baseline import HFBaseline, matching_baseline
from medusa_chat.bench.rows import Row, unmeasured
from medusa_chat.checkpoints.head_weights import tensors_of
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import ContextError, UsageError

CLASSES = {"llama": "MedusaModelLlama", "mistral": "MedusaModelMistral"}
SIZES = (16, 64)  # nodes of the trees that both decode with
WIDEST = 10  # predictions of a head that the reference looks at


def reference(context: PaperContext) -> Iterator[Row]:
    """Tokens a step and a second, greedy and without prefill, of the reference's `medusa_generate`
    and of our engine with the same tree; and of our plain decoding and our own choice of tree."""
    baseline = matching_baseline(context)
    why = _refusal(context, baseline)
    if why or baseline is None or context.reference is None:
        yield unmeasured("medusa / the reference", "tokens/s", why)
        return
    reference_model = ReferenceModel(context.reference, context, baseline)
    source = context.source
    shapes = [source.head(min(size, len(source))) for size in SIZES]
    shapes = [tree for tree in shapes if tree.width <= WIDEST]
    automatic = Variant(GREEDY, context.chosen_tree)
    functions: dict[str, AnswerFunction] = {
        "plain": partial(answer, context, variant=Variant(GREEDY)),
        "medusa, --tree auto": partial(answer, context, variant=automatic),
    }
    for tree in shapes:
        functions[f"the reference, {len(tree)} nodes"] = partial(reference_model.generate, tree)
        variant = Variant(GREEDY, tree)
        functions[f"medusa, {len(tree)} nodes"] = partial(answer, context, variant=variant)
    runs = rotate(context, questions(context), functions)
    for tree in shapes:
        base, ours = f"the reference, {len(tree)} nodes", f"medusa, {len(tree)} nodes"
        same = sum(a.tokens == b.tokens for a, b in zip(runs[base], runs[ours], strict=True))
        note = f"{same} of {len(runs[base])} answers are the same"
        yield per_step(base, runs[base])
        yield per_step(ours, runs[ours], note)
        for name in (base, ours, "medusa, --tree auto", "plain"):
            yield speed(f"{name}: speed", runs[name], runs[base], base)


def _refusal(context: PaperContext, baseline: HFBaseline | None) -> str:
    """Why the reference cannot be timed, "" where it can."""
    if context.reference is None:
        return "needs --reference DIR, a checkout of FasterDecoding/Medusa"
    if baseline is None:
        return f"the reference was not run at {context.loaded.info.precision}"
    config = baseline.model.config
    if config.model_type not in CLASSES:
        return f"the reference supports llama and mistral, not {config.model_type}"
    heads = context.loaded.engine.heads
    if heads is not None and heads.root_weight is not None:
        return "the reference's heads do not read the root: train heads with --no-root"
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    return "" if rope == "default" else f"the reference does not support {rope} rope"


class ReferenceModel:
    """The reference's model with the weights of the baseline and our heads."""

    def __init__(self, folder: Path, context: PaperContext, baseline: HFBaseline) -> None:
        """Raises UsageError where `folder` is no checkout of the reference."""
        heads = context.loaded.engine.heads
        assert heads is not None
        context.progress("loading: the reference")
        self._baseline = baseline
        self._text = _Text(baseline)
        with _importable(folder):
            self._code = import_module("medusa.model.medusa_model")
            family = getattr(self._code, CLASSES[baseline.model.config.model_type])
            self._model = _model(family, baseline, heads, self._text)
            own = _heads(heads, baseline.model.get_output_embeddings().weight)
            self._model.load_state_dict(baseline.model.state_dict() | own)
        self._model.to(device=baseline.model.device, dtype=baseline.model.dtype).eval()
        self._prefill = self._code.initialize_medusa
        self._code.initialize_medusa = self._prefilled
        self._started = 0.0

    def _prefilled(self, *asked: Any) -> Any:
        made = self._prefill(*asked)
        self._started = perf_counter()
        return made

    def generate(self, tree: Tree, question: Question) -> Run:
        """One greedy answer of its generator, without its text. Raises ContextError without space
        for it."""
        ids = torch.tensor([question.ids], device=self._baseline.model.device)
        most = min(
            self._baseline.max_new_tokens, self._baseline.context - len(question.ids) - len(tree)
        )
        if most < 1:
            raise ContextError("the context has no space for an answer")
        steps, tokens = 0, []
        with torch.inference_mode():
            choices = [list(choice) for choice in tree.choices[1:]]
            for _ in self._model.medusa_generate(ids, temperature=0.0, medusa_choices=choices):
                steps, tokens = steps + 1, self._text.seen
                if len(tokens) >= most or self._baseline.ends & set(tokens):
                    break
        seconds = perf_counter() - self._started
        return Run(question, self._cut(tokens, most), steps, float(len(tokens)), seconds)

    def _cut(self, tokens: list[int], most: int) -> tuple[int, ...]:
        ends = (i for i, token in enumerate(tokens) if token in self._baseline.ends)
        return tuple(tokens[: min(most, next(ends, most))])


class _Text:
    """Stands for the tokenizer, by which the reference decodes the whole answer at each step."""

    eos_token_id = -1  # no end: the caller looks for the end tokens

    def __init__(self, baseline: HFBaseline) -> None:
        self.seen: list[int] = []

    def decode(self, ids: Any, **options: Any) -> str:
        """An empty text: decoding the text would cost both sides the same."""
        self.seen = ids.tolist()
        return ""


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """A context in which `medusa` is imported from the checkout, transformers has the names it
    needs, and no warning about their use is shown. Raises UsageError."""
    if not (folder / "medusa" / "model" / "medusa_model.py").is_file():
        raise UsageError(
            f"{folder} is not a checkout of FasterDecoding/Medusa (it has no medusa/model): give "
            "its folder"
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


def _model(family: Any, baseline: HFBaseline, heads: MedusaHeads, text: _Text) -> Any:
    """The reference's model for the baseline's configuration, with heads of as many residual layers
    as ours: its own constructor would make one head and use it for all."""
    config = type(baseline.model.config)(**baseline.model.config.to_dict())
    layers, count, size, _ = heads.weight.shape
    rope = config.rope_parameters or {}
    legacy = {
        "medusa_num_heads": 0,
        "medusa_num_layers": layers,
        "pretraining_tp": 1,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": None,
        "_flash_attn_2_enabled": False,
        "_name_or_path": "",
    }
    for name, value in legacy.items():
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
    """Our heads by the names in the reference's model, each with an LM head of its own."""
    last = f"{heads.weight.shape[0]}.weight"
    found = {f"{number}.{last}": lm_head.detach() for number in range(len(heads))}
    return {f"medusa_head.{name}": tensor for name, tensor in (found | tensors_of(heads)).items()}
