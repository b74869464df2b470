"""Reads the parts of a checkpoint: config, tokenizer, backbone, heads."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_chat.errors import ModelError, first_line
from medusa_chat.finding import Checkpoint
from medusa_chat.models import template_for

if TYPE_CHECKING:
    import torch

    from medusa_chat.decoding.heads import MedusaHeads


def read_tokenizer(found: Checkpoint) -> tuple[Any, list[str]]:
    """The backbone's tokenizer; a chat template that it lacks is ours where we know its id, which
    is said. Raises ModelError."""
    tokenizer = _tokenizer(found.backbone)
    for name in filter(None, (found.name, found.base)):
        if not tokenizer.chat_template and (text := template_for(name)):
            tokenizer.chat_template = text
            return tokenizer, [f"it has no chat template of its own: the known one for {name}"]
    return tokenizer, []


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelError(f"{folder} holds no tokenizer: it is only half there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers raises all kinds for broken tokenizer files
        raise ModelError(f"the tokenizer in {folder} is broken: {first_line(error)}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"the tokenizer in {folder} has no fast version: add a tokenizer.json")
    tokenizer.model_max_length = int(1e30)  # the engine knows the context, and refuses in one line
    return tokenizer


def read_config(folder: Path) -> Any:
    """The model's configuration; a family that cannot be decoded as a tree is refused by name."""
    from transformers import AutoConfig

    from medusa_chat.decoding.backbone import refuse_unfit

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises all kinds for broken files
        raise ModelError(f"the config in {folder} cannot be read: {first_line(error)}") from error
    refuse_unfit(config)
    return config


def read_model(found: Checkpoint, config: Any, precision: str, device: "torch.device") -> Any:
    """The backbone, frozen. Pickled weights go through the gate first. Raises ModelError."""
    import torch
    from transformers import AutoModelForCausalLM

    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    half = torch.bfloat16 if device.type == "cpu" else torch.float16
    folder = _safe_folder(found)
    try:
        with _silent():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                generation_config=_generation_config(found.backbone, config),
                dtype=kinds.get(precision, half),
                quantization_config=_quantization(precision, half),
                device_map={"": device},
                attn_implementation="eager",
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                # transformers would load an adapter that lies there, and what that one names
                adapter_kwargs={"subfolder": "no-adapter"},
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers and safetensors raise all kinds for broken files
        raise ModelError(
            f"the model in {found.backbone} cannot be read: {first_line(error)}"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"the weights in {found.backbone} lack {missing[0]} and {len(missing) - 1} more: the "
            "folder is only half there"
        )
    return model.eval().requires_grad_(False)


@contextmanager
def _silent() -> Iterator[None]:
    """Without the bars and tables of transformers: heads among the weights are no news to us."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _generation_config(folder: Path, config: Any) -> Any:
    """The backbone's generation config, else what its own config says of generation."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    return GenerationConfig.from_model_config(config)


def _safe_folder(found: Checkpoint) -> Path:
    """Where the backbone's weights are as safetensors: its own folder, or the gate's."""
    from medusa_chat import gate

    if not found.weights.is_pickled:
        return found.backbone
    return gate.convert([found.backbone / file for file in found.weights.files], finite=False)


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


def read_heads(found: Checkpoint, config: Any) -> "tuple[MedusaHeads | None, list[str]]":
    """The heads on the CPU, fit for the backbone of this config, and what had to be cut. A
    wrong hidden size is refused before anything is read. Raises ModelError."""
    import torch

    from medusa_chat.decoding.heads import MedusaHeads

    if found.heads is None:
        return None, []
    text = config.get_text_config()
    hidden, vocabulary = int(text.hidden_size), int(text.vocab_size)
    where = " and ".join(str(found.folder / file) for file in found.heads.files)
    if found.heads.hidden != hidden:
        raise ModelError(
            f"{where} is for hidden size {found.heads.hidden} and the backbone has {hidden}: give "
            "the backbone that the heads were trained on"
        )
    heads = MedusaHeads.from_tensors(_read_tensors(found, where))
    if not all(torch.isfinite(t).all() for t in heads.parameters()):
        raise ModelError(f"{where} holds NaN or infinity: the heads are broken, fetch them again")
    try:
        cut = heads.fit(vocabulary)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error
    padded = f"{cut} padded rows of the heads' LM heads are cut: the backbone has {vocabulary}"
    return heads, [padded] if cut else []


def _read_tensors(found: Checkpoint, where: str) -> "dict[str, torch.Tensor]":
    """The heads' tensors under their canonical names."""
    from safetensors import SafetensorError, safe_open

    assert found.heads is not None
    tensors = {}
    try:
        for file in found.heads.files:
            with safe_open(_safe_file(found, file), framework="pt") as opened:
                for name, (place, inside) in found.heads.tensors.items():
                    if place == file:
                        tensors[name] = opened.get_tensor(inside)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{where} cannot be read: {first_line(error)}") from error
    return tensors


def _safe_file(found: Checkpoint, file: str) -> Path:
    """A file of heads as safetensors: itself, or what the gate made of it."""
    from medusa_chat import gate

    path = found.folder / file
    if path.suffix == ".safetensors":
        return path
    if found.heads is not None and found.heads.is_whole:
        files = [found.backbone / name for name in found.weights.files]
        names = dict(zip(files, gate.target_names(files), strict=True))
        return gate.convert(files, finite=False) / names[found.backbone / path.name]
    return gate.convert([path], finite=True) / gate.target_names([path])[0]
