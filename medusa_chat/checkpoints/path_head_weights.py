"""The modules of drafters whose heads read the path: Hydra's and the MLP speculator's."""

import torch
from torch import Tensor, nn

from medusa_chat.checkpoints.drafter_weights import LAYER, decoder_of, linear, norm, tensors_of
from medusa_chat.checkpoints.layouts.drafter_file import Sizes
from medusa_chat.checkpoints.layouts.hydra_file import HydraFile
from medusa_chat.checkpoints.layouts.mlp_file import MlpFile
from medusa_chat.decoding.drafters.hydra_model import HydraHead, HydraModel
from medusa_chat.decoding.drafters.mlp_speculator import SpeculatorModel, Stage
from medusa_chat.decoding.drafters.own_layers import Lent
from medusa_chat.errors import ModelError

ROPE_BASE = 10_000.0  # of Hydra++'s layer, whatever the backbone's is


def read_hydra(
    found: HydraFile, lent: Lent, sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> HydraModel:
    """Hydra's heads on a device. Raises ModelError."""
    found.refuse_other(sizes)
    tensors = tensors_of(found, device, dtype)
    heads = [_hydra_head(found, tensors, number, sizes.hidden) for number in range(found.heads)]
    if "norm.weight" not in tensors:
        return HydraModel(heads, None, None, lent).requires_grad_(False)
    decoder = decoder_of(found, sizes.hidden, tensors, device, layer=_backbone_layer(lent))
    last = norm(tensors["norm.weight"], decoder.config.rms_norm_eps)
    return HydraModel(heads, decoder, last, lent).requires_grad_(False)


def _backbone_layer(lent: Lent) -> dict[str, object]:
    """The backbone's config of a layer, which Hydra++'s is one of."""
    kept = [key for key in LAYER if not key.startswith("rope_")]
    found = {key: getattr(lent.config, key, None) for key in kept}
    return {key: value for key, value in found.items() if value is not None} | {
        "rope_theta": ROPE_BASE
    }


def _hydra_head(
    found: HydraFile, tensors: dict[str, Tensor], number: int, hidden: int
) -> HydraHead:
    prefix = f"hydra_mlp.{number}."
    places = sorted({int(n.split(".")[2]) for n in tensors if n.startswith(prefix)})
    first, *others = places or [0]

    def made(name: str, ins: int, outs: int) -> nn.Linear:
        weight, bias = tensors.get(f"{name}.weight"), tensors.get(f"{name}.bias")
        if weight is None or bias is None:
            raise ModelError(f"{found.path} lacks {name}.weight or its bias: download it again")
        if weight.shape != (outs, ins):
            raise ModelError(
                f"{found.path}: {name}.weight is {tuple(weight.shape)}, {(outs, ins)} was "
                "expected: download it again"
            )
        if bias.shape != (outs,):
            raise ModelError(
                f"{found.path}: {name}.bias is {tuple(bias.shape)}, {(outs,)} was expected: "
                "download it again"
            )
        return linear(weight, bias)

    blocks = [made(f"{prefix}{place}.linear", hidden, hidden) for place in others]
    if all(_is_same(blocks[0], block) for block in blocks[1:]):
        blocks = blocks[:1] * len(blocks)  # one block that is repeated, in the file several times
    read = (number + 2) * hidden
    return HydraHead(
        made(f"{prefix}{first}.res_connection", read, hidden),
        made(f"{prefix}{first}.linear", read, hidden),
        blocks,
        made(f"hydra_lm_head.{number}", hidden, found.sizes[1]),
    )


def _is_same(one: nn.Linear, other: nn.Linear) -> bool:
    return torch.equal(one.weight, other.weight) and torch.equal(one.bias, other.bias)


def read_mlp(
    found: MlpFile, lent: Lent, sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> SpeculatorModel:
    """An MLP speculator on a device; it borrows nothing of the backbone. Raises ModelError."""
    found.refuse_other(sizes)
    tensors = tensors_of(found, device, dtype)
    width, tokens = found.shapes["proj.0.weight"][0], found.sizes[1]
    tables: dict[str, nn.Embedding] = {}
    linears: dict[str, nn.Linear] = {}

    def checked(part: str, head: int, *shape: int) -> tuple[str, Tensor]:
        name = found.stored(part, head)
        if tensors[name].shape != shape:
            raise ModelError(
                f"{found.path}: {name} is {tuple(tensors[name].shape)}, {shape} was expected: "
                "download it again"
            )
        return name, tensors[name]

    stages = []
    for head in range(found.heads):
        table, rows = checked("emb", head, tokens, width)
        project, weight = checked("proj", head, width, width if head else sizes.hidden)
        last, logits = checked("head", head, tokens, width)
        scale, shift = (checked(part, head, width)[1] for part in ("ln", "ln bias"))
        embedding = tables.setdefault(table, nn.Embedding.from_pretrained(rows))
        parts = (
            linears.setdefault(name, linear(matrix, None))
            for name, matrix in ((project, weight), (last, logits))
        )
        first, final = parts
        stages.append(Stage(embedding, first, scale, shift, final))
    made = SpeculatorModel(stages, found.heads, bool(found.config.get("scale_input")))
    return made.requires_grad_(False)
