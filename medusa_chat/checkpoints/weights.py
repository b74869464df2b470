"""The backbone of a checkpoint: its config and its weights, read and frozen."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, modeling_utils
from transformers import conversion_mapping as layouts
from transformers.utils import logging as transformers_logging

from medusa_chat.checkpoints import kept_copies, pickle_sandbox, quantised
from medusa_chat.checkpoints.devices import held_bytes, is_exhausted
from medusa_chat.checkpoints.generation_config import not_applied, read_generation_config
from medusa_chat.checkpoints.layouts.folders import model_files
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.layouts.text_part import NAMES, text_part
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.memory_needs import QUANTISED
from medusa_chat.checkpoints.unread import refuse_unread
from medusa_chat.decoding.backends.quantised import hold
from medusa_chat.decoding.families import refuse_unfit
from medusa_chat.errors import ModelError, first_line


def read_config(folder: Path) -> Any:
    """The model's configuration, of a vision-language model its text part's; a family that cannot
    be decoded as a tree is refused by name."""
    options = {"trust_remote_code": False, "local_files_only": True}
    config = _made(folder, lambda: AutoConfig.from_pretrained(folder, **options))
    if not isinstance(config.get_text_config(), PreTrainedConfig):
        raise ModelError(
            f"the config in {folder} has a text_config its family does not support: fetch it again"
        )
    whole = _made(folder, config.to_dict)
    if (text := text_part(whole)) is not whole:
        config = _made(folder, lambda: AutoConfig.for_model(**text))
    refuse_unfit(config)
    return config


def config_of(found: Checkpoint) -> Any:
    """The backbone's config: read_config's, or what was read of a GGUF file's header."""
    if not found.weights.stored:
        return read_config(found.backbone)
    config = _made(found.source, lambda: AutoConfig.for_model(**found.weights.config))
    refuse_unfit(config)
    return config


def _made(where: Path, make: Callable[[], Any]) -> Any:
    try:
        with _silent():
            return make()
    except Exception as error:  # transformers raises all kinds for broken files and odd numbers
        raise ModelError(
            f"the config in {where} cannot be read: {first_line(error)}: fetch it again, or mend it"
        ) from error


def read_model(found: Checkpoint, config: Any, precision: str, device: torch.device) -> Any:
    """The backbone on one device, frozen. Raises ModelError."""
    return read_backbone(found, config, precision, device)[0]


def read_backbone(
    found: Checkpoint,
    config: Any,
    precision: str,
    device: torch.device,
    device_map: Mapping[str, int | str] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Any, list[str]]:
    """The backbone, frozen, and what to tell of it. Pickled weights go through the sandbox first;
    what bitsandbytes quantises is read from what was kept of it, else kept. device_map: module ->
    where it lies; None for all on `device`. dtype: to read it in, instead. Raises ModelError."""
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    half = _half(device, config)
    options = {
        "generation_config": (generation := read_generation_config(found.backbone, config)),
        "dtype": dtype or kinds.get(precision, half),
        "device_map": dict(device_map) if device_map else {"": device},
    }
    notes = not_applied(generation)
    if dtype is not None or precision not in QUANTISED:
        is_packed = getattr(config, "quantization_config", None) is not None
        model = _read(_safe_folder(found), found.backbone, config=config, **options)
        if is_packed:
            _unify(model, options["dtype"])
        return _frozen(model), notes
    kept = quantised.find(found, precision, str(half))
    if kept is not None:
        try:
            model = _read(kept, found.backbone, **options)
            return _frozen(model), ["read as it was quantised before", *notes]
        except ModelError:
            kept_copies.drop(kept)  # damaged: made anew from the source
    options |= {"config": config, "quantization_config": quantised.settings(precision, half)}
    model = _read(_safe_folder(found), found.backbone, **options)
    with _silent():
        notes.insert(0, quantised.keep(model, found, precision, str(half), held_bytes(model)))
    return _frozen(model), notes


def empty_model(found: Checkpoint, config: Any) -> Any:
    """The backbone on no device, without values. Raises ModelError for a config of which no model
    can be made, and where safetensors files hold other tensors than it has."""
    weights = found.weights
    is_quantised = getattr(config, "quantization_config", None) is not None
    if not (weights.stored or weights.is_pickled or is_quantised):
        options = {"config": config, "device_map": {"": "meta"}, "dtype": torch.float32}
        return _read(found.backbone, found.backbone, **options)
    try:
        with torch.device("meta"), _silent():
            return AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", dtype=torch.float32
            )
    except Exception as error:  # as where the weights are read
        raise _unread_error(found.backbone, error) from error


def is_kept(found: Checkpoint, config: Any, precision: str, device: torch.device) -> bool:
    """Whether the backbone was quantised before and can be read as such."""
    return quantised.find(found, precision, str(_half(device, config))) is not None


def _half(device: torch.device, config: Any) -> torch.dtype:
    """What stays in 16 bits of a quantised model, and what its products are computed in: bf16 on a
    CPU, and on a GPU that has it where the source is bf16 (activations of Qwen2.5 and Gemma
    overflow fp16); else fp16."""
    if device.type == "cpu":
        return torch.bfloat16
    is_source = getattr(config, "dtype", None) == torch.bfloat16
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if is_source and has_bf16 else torch.float16


def _read(folder: Path, backbone: Path, **options: Any) -> Any:
    """The model whose safetensors files lie in `folder`. backbone: the folder that messages name.
    Raises ModelError."""
    _know_turned_experts()
    if "config" in options:  # the file that was surveyed, whatever the config or the folder says
        options["config"].transformers_weights = _weights_file(folder)
    try:
        with _silent(), _in_pieces():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                attn_implementation="eager",
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                key_mapping=NAMES,
                # transformers would load an adapter that lies there, and the base it names; no
                # folder can have this name
                adapter_kwargs={"subfolder": "\0"},
                **options,
            )
    except Exception as error:  # transformers and safetensors raise all kinds for broken files
        if is_exhausted(error):
            raise
        raise _unread_error(backbone, error) from error
    finally:
        if "config" in options:
            del options["config"].transformers_weights
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"the weights in {backbone} lack {missing[0]}{more}: the folder is incomplete, "
            "fetch it again"
        )
    refuse_unread(model, report["unexpected_keys"], backbone)
    model._weight_conversions = None  # or save_pretrained would write the names of the files
    hold(model)
    return model


def _unread_error(backbone: Path, error: Exception) -> ModelError:
    return ModelError(
        f"the model in {backbone} cannot be read: {first_line(error)}: its config.json or its "
        "weights are broken, fetch them again"
    )


def _weights_file(folder: Path) -> str:
    """The file by which the weights of a folder are read: the index, or the one that there is."""
    names = model_files(LocalFolder(folder))
    return names[0] if names == ("model.safetensors",) else pickle_sandbox.INDEX


def _know_turned_experts() -> None:
    """Let Qwen3's mixtures be read of files as Qwen3-VL's are published: experts as [in, out]."""
    own, more = map(layouts.get_checkpoint_conversion_mapping, ("qwen3_moe", "qwen3_vl_moe"))
    both = [*own, *more]
    layouts.register_checkpoint_conversion_mapping("Qwen3MoeForCausalLM", both, overwrite=True)


def _unify(model: Any, dtype: torch.dtype) -> None:
    """In one dtype what transformers unpacked of a quantised source, in that of the scales."""
    if {p.dtype for p in model.parameters()} <= {torch.float32, torch.bfloat16, torch.float16}:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)


def _frozen(model: Any) -> Any:
    return model.eval().requires_grad_(False)


@contextmanager
def _in_pieces() -> Iterator[None]:
    """Without the one block of the whole model's size that transformers takes on a GPU before it
    loads: what layers leave when they are merged could never be given back from within it (3.2 of
    16.6 GB for a 7B in fp16, tests/checkpoints/test_load_replay.py)."""
    before = modeling_utils.caching_allocator_warmup
    modeling_utils.caching_allocator_warmup = lambda *_: None
    try:
        yield
    finally:
        modeling_utils.caching_allocator_warmup = before


@contextmanager
def _silent() -> Iterator[None]:
    """Hide the bars and tables of transformers: heads among the weights are no news to us."""
    # advice to install a package that fetches kernels from the Hub; a line for each 8-bit product
    for name in ("backends.cpu.ops", "autograd._functions"):
        logging.getLogger(f"bitsandbytes.{name}").setLevel(logging.ERROR)
    before = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _safe_folder(found: Checkpoint) -> Path:
    """Where the backbone's weights are as safetensors: its own folder, or the sandbox's."""
    if not found.weights.is_pickled:
        return found.backbone
    return pickle_sandbox.convert(
        [found.backbone / file for file in found.weights.files], finite=False
    )


def weight_files(found: Checkpoint) -> list[Path]:
    """The files of the backbone's weights, all safetensors."""
    if found.weights.is_pickled:
        return sorted(_safe_folder(found).glob("*.safetensors"))
    return [found.backbone / name for name in found.weights.files]
