"""Numbers of the authors' own code for random heads, for tests/decoding/test_path_heads.py.

    git clone https://github.com/zankner/Hydra; git -C Hydra checkout 3f39fbd2
    git clone https://github.com/foundation-model-stack/fms-extras
    git -C fms-extras checkout 16339f7c; pip install ibm-fms
    PYTHONPATH=tests python -m support.reference_path_heads Hydra fms-extras

prints reference_path_heads.json: of each kind the first logits of every head at every place of a
text. The layer before the heads of Hydra++ is transformers' own Llama.
"""

import importlib.util
import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from transformers import LlamaConfig, LlamaModel

from support import path_head_files

HIDDEN, VOCABULARY, TOKENS = 32, 48, [5, 9, 13, 7, 30, 2, 40, 11]


def states() -> torch.Tensor:
    """Of the text's tokens [m, HIDDEN]."""
    return torch.randn(len(TOKENS), HIDDEN, generator=torch.Generator().manual_seed(8))


def table() -> torch.nn.Embedding:
    """The backbone's embedding."""
    random = torch.Generator().manual_seed(9)
    return torch.nn.Embedding.from_pretrained(torch.randn(VOCABULARY, HIDDEN, generator=random))


def layer() -> LlamaConfig:
    """The backbone's config."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=path_head_files.INNER,
        num_attention_heads=path_head_files.HEADS,
        num_key_value_heads=path_head_files.KEYS,
        head_dim=path_head_files.HEAD,
        num_hidden_layers=2,
        rms_norm_eps=1e-6,
    )


@cache
def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hydra(folder: Path, has_prefix: bool) -> list[list[float]]:
    kept = ModuleType("hydra.model.modeling_llama_kv")
    kept.LlamaModel = LlamaModel
    sys.modules |= {"hydra": ModuleType("hydra"), "hydra.model": ModuleType("hydra.model")}
    sys.modules["hydra.model.modeling_llama_kv"] = kept
    name = "prefix_mlp_head" if has_prefix else "mlp_head"
    module = loaded(folder / "hydra" / "model" / "hydra_heads" / f"{name}.py")
    made = (module.HydraPrefixMLP if has_prefix else module.HydraMLP)(
        2, path_head_files.COUNT, True, table(), layer()
    )
    tensors = path_head_files.hydra(HIDDEN, VOCABULARY, has_prefix)
    made.load_state_dict(tensors | {"input_embed_fn.weight": table().weight})
    logits, _ = made.eval()(states()[None], torch.tensor([TOKENS]))
    return [[round(x, 4) for x in row[:3]] for one in logits for row in one[0].tolist()]


def mlp(folder: Path, **options: bool) -> list[list[float]]:
    from fms.utils import serialization  # no other test needs it

    serialization.register_adapter = lambda *_: None  # whose arguments have changed since
    module = loaded(folder / "fms_extras" / "models" / "speculator.py")
    count = path_head_files.COUNT
    made = module.MLPSpeculator(HIDDEN, path_head_files.STATE, VOCABULARY, count, **options)
    tensors = path_head_files.mlp(HIDDEN, VOCABULARY)
    made.load_state_dict({n.removeprefix("speculator."): t for n, t in tensors.items()})
    text = torch.tensor([TOKENS])
    logits = made.eval()(states()[None, : len(TOKENS) - count], text)
    return [[round(x, 4) for x in row[:3]] for one in logits for row in one[0].tolist()]


if __name__ == "__main__":
    ours, ibm = map(Path, sys.argv[1:])
    with torch.inference_mode():
        found = {
            "Hydra": hydra(ours, False),
            "Hydra++": hydra(ours, True),
            "MLP": mlp(ibm),
            "MLP, scaled": mlp(ibm, scale_input=True),
        }
    print(json.dumps(found))
