"""The speed table: transformers' generate, our plain decoding and Medusa, in one run."""

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

from medusa_chat.checkpoint import Checkpoint, LoadedModel, load
from medusa_chat.decoding.events import Finished, Prefilled
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.presets import load_tree
from medusa_chat.worker import encode, resolve

PROMPTS = (
    "I want to book a table for two in San Jose tonight.",
    "What is the capital of Spain?",
    "Tell me a story about a fox and a lost lamp.",
    "Find me a hotel in London with a good rating, please.",
    "Why are you fast?",
    "What movies are playing near me this weekend?",
)


@dataclass
class Contestant:
    """One way to decode. answer: prompt ids -> (token ids without the end token, seconds).

    per_round: tokens per second of each round over all prompts, prefill included.
    """

    name: str
    answer: Callable[[list[int]], tuple[tuple[int, ...], float]]
    command: str
    per_round: list[float] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)


@dataclass
class Steps:
    """Decoding steps of one of our own contestants, per round: how many, tokens, seconds."""

    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def milliseconds(self) -> list[float]:
        """Mean step of each round."""
        return [1e3 * s / n for s, n in zip(self.seconds, self.steps, strict=True) if n]


def run(
    request: LoadRequest,
    *,
    rounds: int,
    max_new_tokens: int,
    tree: str,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Measure at temperature 0, a warm-up round apart. Returns {"machine", "rows"}.

    Every round answers the same prompts with every contestant, in an order that moves on by one
    each round; an answer's time includes its prefill and starts from an empty cache. Our own
    steps are timed without the record that a trace keeps of each. Raises UsageError without heads.
    """
    loaded = _loaded(request, progress)
    if not loaded.info.heads:
        raise UsageError(f"{loaded.info.name} has no Medusa heads: there is nothing to compare")
    prompts = [encode(loaded, [{"role": "user", "content": text}])[0] for text in PROMPTS]
    plain, medusa = Steps(), Steps()
    contestants = [
        *_generates(request, loaded, max_new_tokens, progress),
        _ours("plain", "none", loaded, tree, max_new_tokens, plain),
        _ours("medusa", "medusa", loaded, tree, max_new_tokens, medusa),
    ]
    for number in range(rounds + 1):
        progress(f"round {number} of {rounds}" if number else "warm-up")
        for turn in range(len(contestants)):
            _play(contestants[(turn + number) % len(contestants)], prompts)
    for record in (plain, medusa):
        del record.steps[:1], record.tokens[:1], record.seconds[:1]
    rows = list(_rows(contestants, plain, medusa, loaded))
    return {"machine": machine(loaded, tree), "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The rows as a text table, the machine above them."""
    lines = [f"{key}: {value}" for key, value in result["machine"].items()]
    lines += ["", f"{'':22}{'median':>10}{'min':>10}{'max':>10}  {'unit':12}{'ratio':>7}  against"]
    for row in result["rows"]:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}x"
        figures = "".join(f"{row[key]:>10.2f}" for key in ("value", "min", "max"))
        end = f"{ratio:>7}  {row['against'] or ''}".rstrip()
        lines.append(f"{row['name']:22}{figures}  {row['unit']:12}{end}")
    return "\n".join(lines)


def machine(loaded: LoadedModel, tree: str) -> dict[str, Any]:
    """What the figures were measured on."""
    import torch
    import transformers

    info = loaded.info
    is_cuda = info.device.startswith("cuda")
    name = torch.cuda.get_device_name() if is_cuda else platform.processor() or platform.machine()
    shape = info.tree_reason if tree == "auto" else f"{len(load_tree(tree))} nodes"
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return {
        "device": f"{info.device} ({name}, {threads})",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": f"{info.name}, {info.parameters / 1e6:.1f} M parameters, {info.precision}",
        "tree": f"{tree}: {shape}",
        "prompts": len(PROMPTS),
    }


def _loaded(request: LoadRequest, progress: Callable[[str], None]) -> LoadedModel:
    loaded = None
    for phase, model in load(request):
        progress(f"loading: {phase.name}")
        loaded = model
    assert loaded is not None
    return loaded


def _generates(
    request: LoadRequest,
    loaded: LoadedModel,
    max_new_tokens: int,
    progress: Callable[[str], None],
) -> Iterator[Contestant]:
    """transformers' generate on the stock model, in fp32 and in half precision."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = Checkpoint.find(request).backbone
    device = loaded.engine.backbone.device
    for dtype in ("float32", "bfloat16"):
        progress(f"loading: the stock model in {dtype}")
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), device_map={"": device}, local_files_only=True
        ).eval()

        def answer(ids: list[int], model: Any = model) -> tuple[tuple[int, ...], float]:
            prompt = torch.tensor([ids], device=device)
            started = perf_counter()
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(loaded.engine.eos),
            )
            found = out[0, len(ids) :].tolist()
            seconds = perf_counter() - started
            return tuple(t for t in found if t not in loaded.engine.eos), seconds

        yield Contestant(f"generate-{dtype}", answer, "transformers generate(do_sample=False)")


def _ours(
    name: str,
    drafter: str,
    loaded: LoadedModel,
    tree: str,
    max_new_tokens: int,
    record: Steps,
) -> Contestant:
    """Our engine with one drafter; its steps are added to `record`, an entry a round."""
    asked = GenerationSettings(drafter=drafter, tree=tree, max_new_tokens=max_new_tokens, seed=0)
    settings, shape = resolve(loaded, asked)
    engine = loaded.engine
    served = 0

    def answer(ids: list[int]) -> tuple[tuple[int, ...], float]:
        nonlocal served
        engine.forget()
        started = perf_counter()
        maker = engine.drafter(settings, shape, details=False)
        for event in engine.generate(ids, maker, settings, details=False):
            assert not isinstance(event, Prefilled) or event.reused_tokens == 0
        seconds = perf_counter() - started
        assert isinstance(event, Finished)
        if served % len(PROMPTS) == 0:
            record.steps.append(0)
            record.tokens.append(0)
            record.seconds.append(0.0)
        served += 1
        emitted = round((event.stats.acceleration_rate or 0) * event.stats.steps)
        record.steps[-1] += event.stats.steps
        record.tokens[-1] += emitted
        record.seconds[-1] += event.stats.seconds
        return event.token_ids, seconds

    command = f"medusa-chat bench --tree {tree} --max-new-tokens {max_new_tokens}"
    return Contestant(name, answer, command)


def _play(contestant: Contestant, prompts: list[list[int]]) -> None:
    found = [contestant.answer(ids) for ids in prompts]
    contestant.per_round.append(sum(len(ids) for ids, _ in found) / sum(s for _, s in found))
    contestant.answers = [ids for ids, _ in found]


def _rows(
    contestants: list[Contestant], plain: Steps, medusa: Steps, loaded: LoadedModel
) -> Iterator[dict[str, Any]]:
    rates = {c.name: c.per_round[1:] for c in contestants}
    fastest = max((n for n in rates if n.startswith("generate")), key=lambda n: median(rates[n]))
    by_name = {c.name: c for c in contestants}
    baseline = f"generate ({fastest})"
    rates["generate"] = rates[fastest]
    for name in ("generate-float32", "generate-bfloat16", "generate", "plain", "medusa"):
        against = fastest if name == "generate" else baseline
        command = by_name[fastest if name == "generate" else name].command
        yield _row(name, rates[name], "tokens/s", command, against, rates["generate"])
    bench = "medusa-chat bench"
    ours = by_name["medusa"].command
    yield _row("medusa / plain", rates["medusa"], "tokens/s", bench, "plain", rates["plain"])
    if not all(medusa.steps) or not all(plain.steps):
        raise UsageError("the answers end before the first step: raise --max-new-tokens")
    lengths = [t / s for t, s in zip(medusa.tokens, medusa.steps, strict=True)]
    yield _row("acceleration rate", lengths, "tokens/step", ours)
    yield _row("plain step", plain.milliseconds, "ms", by_name["plain"].command)
    yield _row("tree step", medusa.milliseconds, "ms", ours, "plain step", plain.milliseconds)
    same = [
        float(a == b)
        for a, b in zip(by_name["medusa"].answers, by_name["plain"].answers, strict=True)
    ]
    yield _row("identical to plain", [sum(same) / len(same)], "of answers", bench)


def _row(
    name: str,
    values: list[float],
    unit: str,
    command: str,
    against: str | None = None,
    baseline: list[float] | None = None,
) -> dict[str, Any]:
    """One row; ratio: the median of the ratios round by round."""
    ratio = median(a / b for a, b in zip(values, baseline, strict=True)) if baseline else None
    return {
        "name": name,
        "value": median(values),
        "unit": unit,
        "min": min(values),
        "max": max(values),
        "against": against,
        "ratio": ratio,
        "command": command,
    }
