"""Writes small whole checkpoints: a tiny Llama, a byte tokenizer, random Medusa heads; and the
same heads in every layout that is found in the wild."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa_chat.checkpoints.head_weights import tensors_of
from medusa_chat.decoding.heads import MedusaHeads
from support.families import tiny
from support.tokenizers import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
VOCABULARY = 256
HIDDEN = 32
Tensors = dict[str, Tensor]


def write_checkpoint(folder: Path, heads: int = 3, template: str | None = TEMPLATE) -> Path:
    """A folder that loads; `heads` 0 leaves them out."""
    model = tiny("llama", vocab_size=VOCABULARY, max_position_embeddings=256, initializer_range=0.2)
    model.generation_config.eos_token_id = 255
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    if heads:
        write_heads(folder, MedusaHeads(heads, HIDDEN))
    return folder


def write_heads(folder: Path, heads: MedusaHeads) -> None:
    """Heads with small random weights, in the layout that shares the LM head."""
    torch.manual_seed(0)
    torch.nn.init.normal_(heads.weight, std=0.1)
    save_file(tensors_of(heads), folder / "medusa_lm_head.safetensors")


# One set of heads in every layout. `layered` heads have one layer and no bias, so that every
# layout can hold them; their LM heads are copies of the backbone's, so that own and shared agree.


def layered(layers: int = 1, heads: int = 3, seed: int = 1) -> Tensors:
    """`{h}.{l}.linear.weight` with random weights."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{head}.{layer}.linear.weight": 0.1 * torch.randn(HIDDEN, HIDDEN, generator=generator)
        for head in range(heads)
        for layer in range(layers)
    }


def with_bias(tensors: Tensors) -> Tensors:
    """The same heads with their zero bias written out."""
    names = [name for name in tensors if name.endswith("linear.weight")]
    return tensors | {n.replace("weight", "bias"): torch.zeros(HIDDEN) for n in names}


def with_own(tensors: Tensors, lm_head: Tensor, layers: int = 1, heads: int = 3) -> Tensors:
    """The same heads with an LM head each."""
    return tensors | {f"{head}.{layers}.weight": lm_head.clone() for head in range(heads)}


def write_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(values), "utf-8")


def heads_folder(folder: Path, **config: Any) -> Path:
    """A folder for heads alone, beside the backbone that its config names."""
    folder.mkdir(parents=True)
    write_json(folder / "config.json", **({"base_model_name_or_path": "../backbone"} | config))
    return folder


def save_pt(tensors: Mapping[str, Tensor], file: Path) -> None:
    torch.save(dict(tensors), file)


def lm_head_of(backbone: Path) -> Tensor:
    return load_file(backbone / "model.safetensors")["lm_head.weight"]


def layout_a_pt(folder: Path, backbone: Path) -> None:
    heads_folder(folder, medusa_num_heads=2, medusa_num_layers=1)
    own = with_own(with_bias(layered()), lm_head_of(backbone))
    save_pt(own, folder / "medusa_lm_head.pt")


def layout_a_safetensors(folder: Path, backbone: Path) -> None:
    heads_folder(folder, medusa_num_heads=3, medusa_num_layers=1)
    own = with_own(with_bias(layered()), lm_head_of(backbone))
    save_file(own, folder / "medusa_lm_head.safetensors")


def layout_b_safetensors(folder: Path, backbone: Path) -> None:
    heads_folder(folder, medusa_num_heads=3, medusa_num_layers=1, version="2")
    save_file(with_bias(layered()), folder / "medusa_lm_head.safetensors")


def layout_b_pt(folder: Path, backbone: Path) -> None:
    heads_folder(folder, medusa_num_heads=3, medusa_num_layers=1, version="2")
    save_pt(with_bias(layered()), folder / "medusa_lm_head.pt")


def layout_b_beside(folder: Path, backbone: Path) -> None:
    """Our own: the heads lie beside the weights of their backbone."""
    shutil.copytree(backbone, folder)
    save_file(with_bias(layered()), folder / "medusa_lm_head.safetensors")


def _whole(folder: Path, backbone: Path, prefix: str, **config: Any) -> tuple[Tensors, Tensors]:
    """A copy of the backbone without weights; its weights and the heads' to put there."""
    shutil.copytree(backbone, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    values = json.loads((folder / "config.json").read_text("utf-8"))
    write_json(folder / "config.json", **(values | config))
    own = with_own(with_bias(layered()), lm_head_of(backbone))
    heads = {f"{prefix}.{name}": tensor for name, tensor in own.items()}
    return load_file(backbone / "model.safetensors"), heads


def _shards(folder: Path, parts: list[Tensors], stem: str, ending: str, save: Callable) -> None:
    """Weights in shards with an index, as transformers writes them."""
    table = {}
    for number, part in enumerate(parts, 1):
        name = f"{stem}-{number:05}-of-{len(parts):05}{ending}"
        save(part, folder / name)
        table |= dict.fromkeys(part, name)
    write_json(folder / f"{stem}{ending}.index.json", metadata={}, weight_map=table)


def save_safetensors(tensors: Tensors, file: Path) -> None:
    save_file(tensors, file, {"format": "pt"})


def layout_c_single(folder: Path, backbone: Path) -> None:
    weights, heads = _whole(folder, backbone, "medusa_head", medusa_num_heads=3)
    save_safetensors(weights | heads, folder / "model.safetensors")


def layout_c_shards(folder: Path, backbone: Path) -> None:
    weights, heads = _whole(folder, backbone, "medusa_head")
    first = {name: t for name, t in heads.items() if ".0.0." in name}
    second = {name: t for name, t in heads.items() if name not in first}
    parts = [dict(list(weights.items())[:5]), dict(list(weights.items())[5:]) | first, second]
    _shards(folder, parts, "model", ".safetensors", save_safetensors)


def layout_c_bin(folder: Path, backbone: Path) -> None:
    weights, heads = _whole(folder, backbone, "medusa_head")
    save_pt(weights | heads, folder / "pytorch_model.bin")


def layout_c_bin_shards(folder: Path, backbone: Path) -> None:
    weights, heads = _whole(folder, backbone, "medusa_head")
    _shards(folder, [weights, heads], "pytorch_model", ".bin", save_pt)


def layout_d_pt(folder: Path, backbone: Path) -> None:
    """One layer, three times: the names share a storage."""
    heads_folder(folder, medusa_num_heads=3, medusa_num_layers=3)
    once = with_bias(layered())
    aliased = {
        n.replace(".0.", f".{layer}."): tensor for n, tensor in once.items() for layer in range(3)
    }
    save_pt(aliased, folder / "medusa_lm_head.pt")


def layout_d_safetensors(folder: Path, backbone: Path) -> None:
    """The same as safetensors, where the copies are written out."""
    heads_folder(folder, medusa_num_heads=3, medusa_num_layers=3)
    once = with_bias(layered())
    save_file(
        {n.replace(".0.", f".{i}."): t.clone() for n, t in once.items() for i in range(3)},
        folder / "medusa_lm_head.safetensors",
    )


def _vllm(prefix: str = "") -> Tensors:
    """vLLM's names, without bias."""
    names = {name: name.split(".") for name in layered()}
    return {f"{prefix}blocks.{n[0]}.layers.{n[1]}.weight": layered()[o] for o, n in names.items()}


def _vllm_folder(folder: Path, **config: Any) -> Path:
    return heads_folder(folder, model_type="medusa", num_heads=3, num_hidden_layers=1, **config)


def layout_e_own(folder: Path, backbone: Path) -> None:
    _vllm_folder(folder, architectures=["MedusaModel"], hidden_size=HIDDEN)
    own = {f"lm_heads.{head}.weight": lm_head_of(backbone) for head in range(3)}
    save_file(_vllm() | own, folder / "model.safetensors")


def layout_e_one(folder: Path, backbone: Path) -> None:
    _vllm_folder(folder, original_lm_head=True)
    one = {"medusa_heads.lm_head.weight": lm_head_of(backbone)}
    save_pt(_vllm("medusa_heads.") | one, folder / "pytorch_model.bin")


def layout_e_map(folder: Path, backbone: Path) -> None:
    """A vocabulary that is not shortened, but in another order."""
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    _vllm_folder(folder, truncated_vocab_size=VOCABULARY)
    mapped = {"lm_head.weight": lm_head_of(backbone)[order].clone(), "token_map": order}
    save_file(_vllm() | mapped, folder / "model.safetensors")


def layout_e_padded(folder: Path, backbone: Path) -> None:
    """Rows beyond the vocabulary, with logits that would win."""
    _vllm_folder(folder)
    rows = torch.cat((lm_head_of(backbone), torch.full((64, HIDDEN), 9.0)))
    own = {f"lm_heads.{head}.weight": rows.clone() for head in range(3)}
    save_file(_vllm() | own, folder / "model.safetensors")


def layout_f_modelopt(folder: Path, backbone: Path) -> None:
    medusa = {"num_medusa_heads": 3, "num_medusa_layers": 1}
    weights, heads = _whole(folder, backbone, "medusa_heads", medusa=medusa)
    save_safetensors(weights | heads, folder / "model.safetensors")


def layout_f_tensorrt(folder: Path, backbone: Path) -> None:
    heads_folder(folder)
    weights = {
        name.replace(".0.linear", ".medusa_layers.0.linear"): tensor
        for name, tensor in with_bias(layered()).items()
    }
    own = {f"{head}.lm_head.weight": lm_head_of(backbone) for head in range(3)}
    both = {f"medusa_heads.{name}": tensor for name, tensor in (weights | own).items()}
    save_file(both, folder / "heads.safetensors")


def layout_g(folder: Path, backbone: Path) -> None:
    """Heads in a file that is named like a model, no bias, base "N/A"."""
    heads_folder(folder, base_model_name_or_path="N/A", medusa_num_heads=4)
    save_file(with_own(layered(), lm_head_of(backbone)), folder / "model.safetensors")


def layout_h(folder: Path, backbone: Path) -> None:
    values = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    weights, heads = _whole(folder, backbone, "medusa_head", medusa_config=values)
    save_safetensors(weights | heads, folder / "model.safetensors")


def layout_i(folder: Path, backbone: Path, scale: float = 0.0) -> None:
    """Heads with a LoRA adapter; at scale 0 it changes nothing."""
    heads_folder(folder, medusa_num_heads=3, medusa_num_layers=1, version="2")
    save_file(with_bias(layered()), folder / "medusa_lm_head.safetensors")
    write_adapter(folder, scale)


def write_adapter(folder: Path, scale: float) -> None:
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for layer in range(2):
        for module, rows in (("q_proj", 32), ("v_proj", 16)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(4, HIDDEN, generator=generator)
            tensors[f"{name}.lora_B.weight"] = scale * torch.randn(rows, 4, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    write_json(
        folder / "adapter_config.json",
        peft_type="LORA",
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        base_model_name_or_path="../backbone",
        task_type="CAUSAL_LM",
    )


def layout_j_zero(folder: Path, backbone: Path) -> None:
    """No layers: LM heads only. Other heads than the rest, so it is compared with its equal."""
    heads_folder(folder, medusa_num_heads=3, medusa_num_layers=0)
    save_pt(with_own({}, lm_head_of(backbone), layers=0), folder / "medusa_lm_head.pt")


def layout_j_folders(folder: Path, backbone: Path) -> None:
    shutil.copytree(backbone, folder / "base")
    heads_folder(folder / "head", base_model_name_or_path=None, version=2)
    save_file(with_bias(layered()), folder / "head" / "medusa_lm_head.safetensors")


def layout_j_config(folder: Path, backbone: Path) -> None:
    """The backbone's config copied whole, and values of odd kinds."""
    values = json.loads((backbone / "config.json").read_text("utf-8"))
    odd = {"medusa_num_heads": "three", "medusa_num_layers": None, "version": 2.0}
    heads_folder(folder, **values, **odd)
    save_pt(with_bias(layered()), folder / "medusa_lm_head.pt")


LAYOUTS: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "A .pt": ("A", layout_a_pt),
    "A .safetensors": ("A", layout_a_safetensors),
    "B .safetensors": ("B", layout_b_safetensors),
    "B .pt": ("B", layout_b_pt),
    "B beside its backbone": ("B", layout_b_beside),
    "C one file": ("C", layout_c_single),
    "C shards": ("C", layout_c_shards),
    "C .bin": ("C", layout_c_bin),
    "C .bin shards": ("C", layout_c_bin_shards),
    "D .pt": ("D", layout_d_pt),
    "D .safetensors": ("B", layout_d_safetensors),  # that the layers are equal stands in no name
    "E own LM heads": ("E", layout_e_own),
    "E one LM head, prefix, .bin": ("E", layout_e_one),
    "E token map": ("E", layout_e_map),
    "E padded": ("E", layout_e_padded),
    "F ModelOpt": ("F", layout_f_modelopt),
    "F TensorRT-LLM": ("F", layout_f_tensorrt),
    "G": ("G", layout_g),
    "H": ("H", layout_h),
    "I": ("I", layout_i),
    "J no layers": ("J", layout_j_zero),
    "J folders": ("B", layout_j_folders),
    "J odd config": ("B", layout_j_config),
}
