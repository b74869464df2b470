"""LoRA adapters: read, checked against the backbone, and merged into it through peft."""

import re
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from medusa_chat.checkpoints import pickle_sandbox
from medusa_chat.checkpoints.layouts.lora import CONFIG, LoraSettings, lora_settings
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.layouts.text_part import name_of
from medusa_chat.errors import ModelError, first_line

WRAPPED = "base_model.model."  # prefix of the names in a model that peft wraps
PART = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.weight|\.bias)?$")
# copies of the embeddings, which peft may write beside the adapter
COPIED = re.compile(r"\.?(\w+)(\.base_layer)?\.weight$")


def merge_adapter(model: Any, file: Path) -> Any:
    """The backbone with the adapter merged into its weights; tied weights of which the adapter
    changes only one are untied. Raises ModelError for another kind of adapter, or one made for
    another backbone."""
    wrapped = with_adapter(model, file)
    try:
        return wrapped.merge_and_unload(safe_merge=True).eval().requires_grad_(False)
    except Exception as error:  # peft raises all kinds for adapters that do not fit
        raise ModelError(f"{file} cannot be merged: {first_line(error)}") from error


def with_adapter(model: Any, file: Path) -> Any:
    """The backbone with the adapter beside its weights. Raises ModelError as `merge_adapter`."""
    from peft import LoraConfig, set_peft_model_state_dict

    settings = lora_settings(LocalFolder(file.parent), CONFIG)
    tensors = _read_tensors(file)
    ranks, alphas = _ranks(tensors, file), {}
    for name in ranks:
        alphas[name_of(name)] = _alpha(settings, name)
    ranks = {name_of(name): rank for name, rank in ranks.items()}
    _refuse_biases(model, tensors, file)
    try:
        _untie(model, ranks)
        rank, rank_pattern = _patterns(ranks)
        alpha, alpha_pattern = _patterns(alphas)
        flags: dict[str, Any] = dict.fromkeys(settings.flags, True)
        config = LoraConfig(
            task_type="CAUSAL_LM",
            inference_mode=True,
            target_modules=list(ranks),
            r=rank,
            rank_pattern=rank_pattern,
            lora_alpha=alpha,
            alpha_pattern=alpha_pattern,
            lora_bias=any(name.endswith(".lora_B.bias") for name in tensors),
            **flags,
        )
        wrapped = wrapped_by_peft(model, config)
        inner = {f"{WRAPPED}{name_of(name)}": tensor for name, tensor in tensors.items()}
        with warnings.catch_warnings():  # about copying into a model on the meta device
            warnings.filterwarnings("ignore", ".* non-meta parameter", UserWarning)
            report: Any = set_peft_model_state_dict(wrapped, inner)
    except Exception as error:  # peft raises all kinds for adapters that do not fit
        raise ModelError(f"{file} does not fit this backbone: {first_line(error)}") from error
    left = [*report.unexpected_keys, *(k for k in report.missing_keys if "lora_" in k)]
    if left:
        raise ModelError(f"{file} does not fit this backbone ({left[0]}): use its own")
    return wrapped


def wrapped_by_peft(model: Any, config: Any) -> Any:
    """The model with a new adapter of a LoraConfig."""
    from peft import get_peft_model

    with warnings.catch_warnings():  # peft still uses a deprecated name of transformers
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return get_peft_model(model, config)


def _ranks(tensors: Mapping[str, Tensor], file: Path) -> dict[str, int]:
    """Module name in the file -> the rank of its change."""
    ranks = {}
    for name, tensor in tensors.items():
        match = PART.search(name)
        if match is None:
            copied = COPIED.search(name)
            if copied is None or copied[1] not in ("embed_tokens", "lm_head", "wte", "embed_in"):
                raise ModelError(
                    f"{file} holds the tensor {name[:120]!r}, which a plain LoRA adapter does not "
                    "have: use a plain LoRA adapter, or merge this one into the backbone"
                )
        elif match[1] in ("A", "embedding_A"):
            if tensor.dim() != 2 or 0 in tensor.shape:
                raise ModelError(
                    f"{file}: tensor {name[:120]!r} is {tuple(tensor.shape)}: download it again"
                )
            ranks[name[: match.start()]] = tensor.shape[0]
    if not ranks:
        raise ModelError(f"{file} holds no LoRA adapter: download it again")
    return ranks


def _alpha(settings: LoraSettings, module: str) -> float:
    """As peft's get_pattern_key: the end of a module's name decides."""
    for pattern, alpha in settings.alphas.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return alpha
    return settings.alpha


def _patterns(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(the most frequent value, pattern of module names -> each other value)."""
    usual = Counter(values.values()).most_common(1)[0][0]
    others: dict[Any, list[str]] = {}
    for name, value in values.items():
        if value != usual:
            others.setdefault(value, []).append(re.escape(name))
    return usual, {"|".join(names): value for value, names in others.items()}


def _refuse_biases(model: Any, tensors: Mapping[str, Tensor], file: Path) -> None:
    modules = dict(model.named_modules())
    for name in tensors:
        if not name.endswith(".lora_B.bias"):
            continue
        module = modules.get(name_of(name.removesuffix(".lora_B.bias")))
        if module is not None and getattr(module, "bias", None) is None:
            raise ModelError(
                f"{file} has biases (lora_bias), but {name.removesuffix('.lora_B.bias')} of this "
                "backbone has no bias to merge them into: use an adapter without biases"
            )


def _untie(model: Any, changed: Mapping[str, int]) -> None:
    """Give the LM head a weight of its own where it or the embeddings are changed."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embeddings.weight:
        return
    names = {name for name, module in model.named_modules() if module in (head, embeddings)}
    if names.isdisjoint(changed):
        return
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


def _read_tensors(file: Path) -> dict[str, Tensor]:
    """The adapter's tensors by their names in the backbone that it was trained on."""
    path = file
    if file.suffix != ".safetensors":
        path = pickle_sandbox.convert([file]) / pickle_sandbox.target_names([file])[0]
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {first_line(error)}") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ModelError(
                f"{file}: tensor {name[:120]!r} holds NaN or infinity: it is broken, "
                "download it again"
            )
    return {name.removeprefix(WRAPPED): tensor for name, tensor in tensors.items()}
