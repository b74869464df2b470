"""Checkpoint: what a folder or Hub repo holds; load() makes a decoding engine of it."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import DeviceError, ModelError, OutOfMemoryError, UsageError
from medusa_chat.messages import LoadPhase, LoadRequest, ModelInfo
from medusa_chat.paths import asset

if TYPE_CHECKING:
    import torch

    from medusa_chat.decoding.engine import Engine
    from medusa_chat.decoding.heads import MedusaHeads
    from medusa_chat.decoding.text import TokenTexts

HEADS_FILE = "medusa_lm_head.safetensors"
CALIBRATION_FILE = "medusa_calibration.json"
PRECISIONS = ("auto", "fp32", "bf16", "fp16", "int8", "nf4")
DEFAULT_CONTEXT = 8192


@dataclass(frozen=True)
class Calibration:
    """Measured rank accuracies a[k][i] (head k's (i+1)-th prediction is right) and the tree
    searched from them, in order of value."""

    accuracies: tuple[tuple[float, ...], ...]
    tree: Tree

    @classmethod
    def read(cls, file: Path) -> "Calibration":
        """Raises ModelError when the file is not a calibration."""
        try:
            values = json.loads(file.read_text("utf-8"))
            table = tuple(tuple(map(float, row)) for row in values["accuracies"])
            return cls(table, Tree.from_choices(values["choices"]))
        except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
            raise ModelError(f"{file} is no calibration ({error}): delete or renew it") from error


@dataclass(frozen=True)
class Checkpoint:
    """Where the parts of a model lie. heads, calibration: None where there are none."""

    name: str
    backbone: Path
    heads: Path | None
    calibration: Path | None

    @classmethod
    def find(cls, request: LoadRequest) -> "Checkpoint":
        """Find the parts on disk, or in the Hub's cache. Raises ModelError, with what to do."""
        folder = _folder(request.checkpoint, request.offline)
        backbone = _folder(request.backbone, request.offline) if request.backbone else folder
        heads = folder / HEADS_FILE
        if not (backbone / "config.json").is_file():
            raise ModelError(
                f"{backbone} holds no config.json: give a folder with a transformers model, or "
                "--backbone for a folder that holds only Medusa heads"
            )
        if not any(file.name != HEADS_FILE for file in backbone.glob("*.safetensors")):
            raise ModelError(f"{backbone} holds no .safetensors weights: it is only half there")
        calibration = folder / CALIBRATION_FILE
        return cls(
            name=request.checkpoint,
            backbone=backbone,
            heads=heads if heads.is_file() else None,
            calibration=calibration if calibration.is_file() else None,
        )


@dataclass
class LoadedModel:
    """A model ready to decode: engine, tokenizer, the default tree and what to tell about it."""

    engine: "Engine"
    tokenizer: Any
    texts: "TokenTexts"
    calibration: Calibration | None
    info: ModelInfo
    said: tuple[str, list[int]] = ("", [])  # the last text as a whole and its exact ids


def load(request: LoadRequest) -> Iterator[tuple[LoadPhase, LoadedModel | None]]:
    """Load phase by phase: resolve, read, check, warm up; the last is "ready" with the model.

    Raises ModelError (missing, broken or refused), DeviceError, OutOfMemoryError, UsageError.
    """
    yield LoadPhase("resolve"), None
    found = Checkpoint.find(request)
    from medusa_chat.decoding.backbone import Backbone
    from medusa_chat.decoding.engine import Engine
    from medusa_chat.decoding.text import TokenTexts

    device = choose_device(request.device)
    precision, reason = choose_precision(request.precision, device)
    yield LoadPhase("read"), None
    with _fitting(found.name, device, precision):
        config = _read_config(found.backbone)
        tokenizer = _read_tokenizer(found.backbone)
        model = _read_model(found.backbone, config, precision, device)
        heads = _read_heads(found, model, device)
        context = _context(request.max_context, model.config.get_text_config())
        parameters = sum(p.numel() for p in model.parameters())
        notes = [reason, *_replace(model)]
        backbone = Backbone(model, context)
        yield LoadPhase("check"), None
        difference = backbone.check()
    engine = Engine(backbone, heads, end_tokens(model, tokenizer))
    engine.name, engine.precision = found.name, precision
    calibration = Calibration.read(found.calibration) if found.calibration else None
    tree, why = auto_tree(calibration, len(heads) if heads else 0, device, precision)
    notes.append(f"attention {backbone.implementation}; tree step checked ({difference:.1g})")
    info = ModelInfo(
        name=found.name,
        family=model.config.model_type,
        precision=precision,
        device=str(device),
        parameters=parameters,
        heads=len(heads) if heads else 0,
        context=context,
        tree="auto",
        nodes=len(tree),
        tree_reason=why,
        memory_bytes=_memory(model, heads) + backbone.cache.nbytes,
        has_template=bool(tokenizer.chat_template),
        notes=tuple(notes),
    )
    yield LoadPhase("warm up"), None
    loaded = LoadedModel(engine, tokenizer, TokenTexts(tokenizer), calibration, info)
    with _fitting(found.name, device, precision):
        _warm_up(loaded, tree)
    yield LoadPhase("ready", info), loaded


@contextmanager
def _fitting(name: str, device: "torch.device", precision: str) -> Iterator[None]:
    """Turn out of memory into a refusal that says what to try."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"{name} does not fit on {device} at {precision}: try --precision nf4, a smaller "
            "--max-context, or a smaller model"
        ) from error


def choose_device(name: str) -> "torch.device":
    """The device that --device names; "auto" takes CUDA, then MPS, then the CPU."""
    import torch

    if name == "auto":
        mps = torch.backends.mps.is_available()
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda", "mps"):
        raise UsageError(f"device is {name!r}: choose auto, cpu, cuda, cuda:N or mps")
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"device is {name!r}, but torch sees no CUDA GPU: see medusa-chat doctor")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise DeviceError("device is 'mps', but this machine has none")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device is {name!r}: choose auto, cpu, cuda, cuda:N or mps") from error


def choose_precision(name: str, device: "torch.device") -> tuple[str, str]:
    """The precision that --precision names and a sentence that says why."""
    import torch

    if name not in PRECISIONS:
        raise UsageError(f"precision is {name!r}: choose one of {', '.join(PRECISIONS)}")
    if name != "auto":
        return name, f"precision {name} as asked"
    if device.type == "cuda":
        chosen = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
        return chosen, f"precision {chosen}: what this GPU computes fastest"
    if device.type == "mps":
        return "fp16", "precision fp16: what MPS computes fastest"
    if torch.cpu._is_amx_tile_supported():
        return "bf16", "precision bf16: this CPU has AMX, where a tree costs little more than a row"
    return "fp32", "precision fp32: this CPU has no fast bf16"


def auto_tree(
    calibration: Calibration | None,
    heads: int,
    device: "torch.device",
    precision: str,
    nodes: int | None = None,
) -> tuple[Tree, str]:
    """What `--tree auto` means: the checkpoint's calibrated tree, else a published one, pruned to
    the heads and cut to `nodes`, else to 16 on a CPU, 64 on a GPU and 32 there at 4 bit; and why.
    """
    from medusa_chat.presets import load_tree

    default = 16 if device.type == "cpu" else 32 if precision == "nf4" else 64
    source = calibration.tree if calibration else load_tree("mc_sim_7b_63")
    origin = "the checkpoint's calibrated tree" if calibration else "the published mc_sim_7b_63"
    if heads:
        source = source.pruned(heads)
    if nodes is not None and nodes > len(source):
        raise UsageError(f"nodes is {nodes}: {origin} has {len(source)} nodes for {heads} heads")
    tree = source.head(nodes or default)
    return tree, f"{origin}, {len(tree)} nodes for {device.type}"


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a turn: the generation config's, and the tokenizer's where its chat
    template uses it."""
    ids = model.generation_config.eos_token_id
    found = set(ids) if isinstance(ids, (list, tuple)) else {ids}
    found.add(tokenizer.eos_token_id)
    for text in ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>"):
        if tokenizer.chat_template and text in str(tokenizer.chat_template):
            found.add(tokenizer.get_vocab().get(text))
    vocabulary = int(model.config.get_text_config().vocab_size)
    return frozenset(i for i in found if isinstance(i, int) and 0 <= i < vocabulary)


def _folder(name: str, offline: bool) -> Path:
    if name == "demo":
        folder = asset("demo")
        if not (folder / "config.json").is_file():
            raise ModelError(f"the demo checkpoint is missing from {folder}: install again")
        return folder
    path = Path(name or "/").expanduser()
    if name and _is_folder(path):
        return path
    if not name.isprintable() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(f"no checkpoint at {name!r}: give a folder, a Hub id or demo")
    return _from_hub(name, offline)


def _is_folder(path: Path) -> bool:
    """Path.is_dir, but a name no folder can have (null bytes, too long) is simply none."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _from_hub(name: str, offline: bool) -> Path:
    """The Hub repo in the local cache, downloaded unless offline."""
    from medusa_chat.hub import resolve

    return resolve(name, offline)


def _read_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelError(f"{folder} holds no tokenizer: it is only half there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers raises all kinds for broken tokenizer files
        raise ModelError(f"the tokenizer in {folder} is broken: {_first_line(error)}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"the tokenizer in {folder} has no fast version: add a tokenizer.json")
    tokenizer.model_max_length = int(1e30)  # the engine knows the context, and refuses in one line
    return tokenizer


def _read_config(folder: Path) -> Any:
    """The model's configuration; a family that cannot be decoded as a tree is refused by name."""
    from transformers import AutoConfig

    from medusa_chat.decoding.backbone import refuse_unfit

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises all kinds for broken files
        raise ModelError(f"the config in {folder} cannot be read: {_first_line(error)}") from error
    refuse_unfit(config)
    return config


def _read_model(folder: Path, config: Any, precision: str, device: "torch.device") -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    half = torch.bfloat16 if device.type == "cpu" else torch.float16
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=kinds.get(precision, half),
            quantization_config=_quantization(precision, half),
            device_map={"": device},
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers and safetensors raise all kinds for broken files
        raise ModelError(f"the model in {folder} cannot be read: {_first_line(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"the weights in {folder} lack {missing[0]} and {len(missing) - 1} more: the folder is "
            "only half there"
        )
    return model.eval().requires_grad_(False)


def _quantization(precision: str, half: "torch.dtype") -> Any:
    """bitsandbytes' configuration for int8 and nf4 (double quantisation), else None."""
    from transformers import BitsAndBytesConfig

    if precision == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    if precision == "nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=half,
        )
    return None


def _read_heads(found: Checkpoint, model: Any, device: "torch.device") -> "MedusaHeads | None":
    """The heads in the model's dtype; refused when they do not fit the backbone."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from medusa_chat.decoding.heads import MedusaHeads

    if found.heads is None:
        return None
    try:
        tensors = load_file(found.heads)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{found.heads} cannot be read: {_first_line(error)}") from error
    heads = MedusaHeads.from_tensors(tensors)
    config = model.config.get_text_config()
    hidden, vocabulary = int(config.hidden_size), int(config.vocab_size)
    if heads.weight.shape[-1] != hidden:
        raise ModelError(
            f"{found.heads} is for hidden size {heads.weight.shape[-1]} and the backbone has "
            f"{hidden}: give the backbone that the heads were trained on"
        )
    if heads.lm_weight is not None and heads.lm_weight.shape[1] != vocabulary:
        raise ModelError(
            f"{found.heads} is for {heads.lm_weight.shape[1]} tokens and the backbone has "
            f"{vocabulary}: give the backbone that the heads were trained on"
        )
    if not all(torch.isfinite(t).all() for t in heads.parameters()):
        raise ModelError(f"{found.heads} holds NaN or infinity: the heads are broken")
    return heads.to(device=device, dtype=model.dtype)


def _context(asked: int | None, config: Any) -> int:
    """How many tokens the cache holds: as asked, else the model's own up to 8192."""
    limit = int(getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT)
    if asked is None:
        return min(limit, DEFAULT_CONTEXT)
    if not 16 <= asked <= limit:
        raise UsageError(f"max-context is {asked}: give a whole number from 16 to {limit}")
    return asked


def _replace(model: Any) -> Sequence[str]:
    from medusa_chat.decoding.submodules import replace_submodules

    return replace_submodules(model)


def _memory(model: Any, heads: Any) -> int:
    """Bytes of every storage once: merged weights are views of each other."""
    parts = [*model.parameters(), *(heads.parameters() if heads is not None else [])]
    storages = {s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in parts)}
    return sum(storages.values())


def _warm_up(loaded: LoadedModel, tree: Tree) -> None:
    """A few steps, so that the first answer does not pay for the first call of anything."""
    from medusa_chat.decoding.settings import GenerationSettings

    engine = loaded.engine
    for drafter in ("none", "medusa" if engine.heads is not None else "prompt-lookup"):
        settings = GenerationSettings(drafter=drafter, max_new_tokens=4, nodes=len(tree), seed=0)
        prompt = [min(5, engine.backbone.vocabulary - 1)] * 4
        for _ in engine.generate(prompt, engine.drafter(settings, tree), settings):
            pass


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
