"""The backbone of a checkpoint: its config, its weights and its LM head, read and frozen."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    modeling_utils,
)
from transformers import conversion_mapping as layouts
from transformers.utils import logging as transformers_logging

from medusa_chat.checkpoints import kept_copies, pickle_sandbox
from medusa_chat.checkpoints.devices import choose_precision, held_bytes, is_exhausted
from medusa_chat.checkpoints.gguf_model import empty_gguf_model, gguf_model, read_gguf_lm_head
from medusa_chat.checkpoints.gguf_weights import GgufWeights
from medusa_chat.checkpoints.kept_copies import Origin
from medusa_chat.checkpoints.layouts.folders import model_files
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.layouts.text_part import NAMES, name_of, text_part
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.memory_needs import QUANTISED
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.backends.quantised import hold
from medusa_chat.decoding.families import refuse_unfit
from medusa_chat.errors import ModelError, first_line

# what changes the text in transformers and not here -> the value that changes nothing
NOT_APPLIED = {
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "min_length": 0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
}
# what older versions of transformers stored of their own making, and scales of a cache in 8 bits
MADE = re.compile(r"(^|\.)(inv_freq|masked_bias|(attn|attention)\.bias|[kv]_scale|kv_scale)$")
DRAFTS = re.compile(r"nextn|mtp")  # keys of a config: layers behind the others that draft tokens
MAX_DRAFTS = 64
QUANTISED_FORMAT = 1  # of what is kept on disk of a quantised backbone
QUANTISED_KIND = "quantised"


def read_config(folder: Path) -> Any:
    """The model's configuration, of a vision-language model its text part's; a family that cannot
    be decoded as a tree is refused by name."""
    options = {"trust_remote_code": False, "local_files_only": True}
    config = _made(folder, lambda: AutoConfig.from_pretrained(folder, **options))
    if not isinstance(config.get_text_config(), PreTrainedConfig):
        raise ModelError(
            f"the config in {folder} has a text_config its family does not support: "
            "download it again"
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
            f"the config in {where} cannot be read: {first_line(error)}: download it again, or "
            "mend it"
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
    is_packed: bool = False,
) -> tuple[Any, list[str]]:
    """The backbone, frozen, and what to tell of it. Pickled weights go through the sandbox first;
    what bitsandbytes quantises is read from what was kept of it, else kept. device_map: module ->
    where it lies; None for all on `device`. dtype: to read it in, instead. is_packed: whether
    the matrices of a GGUF file stay there until our C packs them. Raises ModelError."""
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    half = _half(device, config)
    generation = read_generation_config(found.settings, config)
    if found.weights.stored:
        on_gpu = kinds[choose_precision("auto", device)[0]]  # beside blocks that stay as they are
        kind = kinds.get(precision, torch.bfloat16 if device.type == "cpu" else on_gpu)
        model = gguf_model(found, config, kind, device, is_packed)
        model.generation_config = generation
        return _frozen(model), not_applied(generation)
    options = {
        "generation_config": generation,
        "dtype": dtype or kinds.get(precision, half),
        "device_map": dict(device_map) if device_map else {"": device},
    }
    notes = not_applied(generation)
    if dtype is not None or precision not in QUANTISED:
        was_quantised = getattr(config, "quantization_config", None) is not None
        model = _read(_safe_folder(found), found.backbone, config=config, **options)
        if was_quantised:
            _unify(model, options["dtype"])
        return _frozen(model), notes
    kept = _quantised_before(found, precision, str(half))
    if kept is not None:
        try:
            model = _read(kept, found.backbone, **options)
            return _frozen(model), ["read as it was quantised before", *notes]
        except ModelError:
            kept_copies.drop(kept)  # damaged: made anew from the source
    options |= {"config": config, "quantization_config": _bitsandbytes_config(precision, half)}
    model = _read(_safe_folder(found), found.backbone, **options)
    with _silent():
        notes.insert(0, _keep_quantised(model, found, precision, str(half), held_bytes(model)))
    return _frozen(model), notes


def empty_model(found: Checkpoint, config: Any) -> Any:
    """The backbone on no device, without values. Raises ModelError for a config of which no model
    can be made, and where safetensors files hold other tensors than it has."""
    weights = found.weights
    if weights.stored:
        model = empty_gguf_model(found, config, torch.float32)
        GgufWeights.of(found).refuse_unlike(model)
        return model
    is_quantised = getattr(config, "quantization_config", None) is not None
    if not (weights.is_pickled or is_quantised):
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
    return _quantised_before(found, precision, str(_half(device, config))) is not None


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
            "download it again"
        )
    refuse_unread(model, report["unexpected_keys"], backbone)
    model._weight_conversions = None  # or save_pretrained would write the names of the files
    hold(model)
    return model


def _unread_error(backbone: Path, error: Exception) -> ModelError:
    return ModelError(
        f"the model in {backbone} cannot be read: {first_line(error)}: its config.json or its "
        "weights are broken, download them again"
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
    return pickle_sandbox.convert([found.backbone / file for file in found.weights.files])


def weight_files(found: Checkpoint) -> list[Path]:
    """The files of the backbone's weights, all safetensors."""
    if found.weights.is_pickled:
        return sorted(_safe_folder(found).glob("*.safetensors"))
    return [found.backbone / name for name in found.weights.files]


def read_generation_config(folder: Path, config: Any) -> Any:
    """The backbone's generation config, else what its own config says of generation. Raises
    ModelError."""
    try:
        if (folder / "generation_config.json").is_file():
            with _silent():  # it warns of a temperature without do_sample
                return GenerationConfig.from_pretrained(folder, local_files_only=True)
        return GenerationConfig.from_model_config(config)
    except Exception as error:  # transformers raises all kinds for broken files
        raise ModelError(
            f"the generation_config.json in {folder} cannot be read: {first_line(error)}"
        ) from error


def not_applied(found: Any) -> list[str]:
    """A sentence that names what of a generation config is not applied, where there is any."""
    values = {name: getattr(found, name, None) for name in NOT_APPLIED}
    names = [n for n, value in values.items() if value and value != NOT_APPLIED[n]]
    return [f"not applied, of generation_config.json: {', '.join(names)}"] if names else []


def refuse_unread(model: Any, names: Iterable[str], where: Path) -> None:
    """names: of tensors that nothing reads. Raises ModelError where one lies inside a module that
    the model has, as of a layer too many; other heads, vision parts and what drafts tokens lie
    beside, and of a quantised layer anything may be its method's."""
    drafts = range(
        count := model.config.get_text_config().num_hidden_layers, count + _drafts(model)
    )
    odd = [name for name in sorted(names) if _is_inside(model, name_of(name), drafts)]
    if not odd:
        return
    more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
    raise ModelError(
        f"the weights in {where} hold {odd[0]}{more}, which a {model.config.model_type} model of "
        f"this config has no place for ({count} layers): its config.json is of another model, "
        "download both again"
    )


def _is_inside(model: Any, name: str, drafts: range) -> bool:
    base, prefix = model.base_model, model.base_model_prefix
    parts = name.removeprefix(f"{prefix}.").split(".")
    if MADE.search(name) or not parts[1:]:
        return False
    module = getattr(base, parts[0], None)
    if not isinstance(module, nn.Module):
        module = dict(model.named_children()).get(parts[0])
    if isinstance(module, nn.ModuleList) and parts[1].isdecimal():
        number = int(parts[1])
        if number in drafts:
            return False
        is_there = number < len(module)
        return not (is_there and getattr(model.config, "quantization_config", None))
    return module is not None and not getattr(model.config, "quantization_config", None)


def _drafts(model: Any) -> int:
    """How many layers behind the last draft tokens (multi-token prediction)."""
    values = model.config.get_text_config().to_dict().items()
    counts = [v for key, v in values if DRAFTS.search(key) and type(v) is int]
    return min(max(counts, default=0), MAX_DRAFTS)


def _quantised_before(found: Checkpoint, precision: str, dtype: str) -> Path | None:
    """The folder with this backbone quantised, None where it was not or has changed since. dtype:
    of what stays in 16 bits. No file of the source is opened."""
    folder = _quantised_folder(found, precision, dtype)
    return folder if kept_copies.is_kept(folder) else None


def _keep_quantised(model: Any, found: Checkpoint, precision: str, dtype: str, size: int) -> str:
    """Save a quantised backbone of `size` bytes as it was loaded; a sentence that says so, or why
    it is not kept: a cache that cannot be written only costs time."""
    folder = _quantised_folder(found, precision, dtype)
    origin = Origin(found.name, str(found.source.resolve()), precision)
    try:
        if not kept_copies.has_room(folder, size):
            return f"the {precision} weights are not kept: the disk of {folder.parent} is full"
        with kept_copies.writing(folder, origin) as partial:
            model.save_pretrained(partial, max_shard_size="4GB")
    except (OSError, SafetensorError) as error:
        return f"the {precision} weights are not kept in {folder.parent}: {first_line(error)}"
    return f"the {precision} weights are kept for the next load (medusa-chat models list)"


def _quantised_folder(found: Checkpoint, precision: str, dtype: str) -> Path:
    files = [found.backbone / name for name in ("config.json", *found.weights.files)]
    facts = [QUANTISED_FORMAT, precision, dtype, metadata.version("bitsandbytes")]
    return kept_copies.place(QUANTISED_KIND, facts, files)


def _bitsandbytes_config(precision: str, half: torch.dtype) -> BitsAndBytesConfig:
    """bitsandbytes' configuration for int8 or nf4 (double quantisation). half: the dtype of what
    is computed."""
    if precision == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=half,
    )


def read_lm_head(found: Checkpoint, config: Any) -> LogitHead:
    """The LM head of a backbone on the CPU, its weight [V, d] in the dtype of the file. A family
    whose files name it otherwise than the model is read whole, in bf16. Raises ModelError."""
    if found.weights.stored:
        return read_gguf_lm_head(found, config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    owner = embeddings if linear.weight is embeddings.weight else linear
    name = next(name for name, module in model.named_modules() if module is owner)
    own = next(name for name, module in model.named_modules() if module is linear)
    weight = _lone_tensor(found, f"{own}.weight")  # files may have one that their config calls tied
    weight = _lone_tensor(found, f"{name}.weight") if weight is None else weight
    if weight is None or getattr(linear, "bias", None) is not None:
        linear = read_model(found, config, "bf16", torch.device("cpu")).get_output_embeddings()
    elif weight.shape != linear.weight.shape or not weight.is_floating_point():
        raise ModelError(
            f"{found.backbone}: the LM head is {tuple(weight.shape)} in {weight.dtype}, not "
            f"{tuple(linear.weight.shape)} in 16 or 32 bits: give one that is not quantised"
        )
    else:
        linear.weight = nn.Parameter(weight, requires_grad=False)
    return LogitHead(linear, config.get_text_config())


def _lone_tensor(found: Checkpoint, name: str) -> Tensor | None:
    """The tensor of this name, whatever stands before its last two parts, for files have more than
    one prefix; None where it is not just one."""
    ending = ".".join(name.split(".")[-2:])
    places: list[tuple[Path, str]] = []
    try:
        for file in weight_files(found):
            with safe_open(file, framework="pt") as opened:
                places += [(file, n) for n in opened.keys() if f".{n}".endswith(f".{ending}")]
        if len(places) != 1:
            return None
        with safe_open(places[0][0], framework="pt") as opened:
            weight: Tensor = opened.get_tensor(places[0][1])
            return weight
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{found.backbone} cannot be read: {first_line(error)}") from error
