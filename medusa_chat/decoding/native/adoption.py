"""Adoption: which models the C library decodes, and how a backbone is given to it."""

from typing import Any

import torch
from torch import nn

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.native.decoder import NativeDecoder
from medusa_chat.decoding.native.heads import NativeHeads
from medusa_chat.decoding.native.judge import NativeJudge
from medusa_chat.decoding.native.library import WIDEST_PANEL, Team
from medusa_chat.decoding.native.linear import NativeLinear
from medusa_chat.decoding.native.step import NativeStep
from medusa_chat.decoding.parity import agrees
from medusa_chat.decoding.submodules import FusedDecoder, is_plain_layer

NUMBERS = torch.float32  # of keys, values and masks
DTYPES = (torch.float32, torch.bfloat16)
MOST_BYTES = 2**29  # of weights, which are held twice
WIDEST = 512  # of an attention head
LARGEST = 16384  # of a hidden state
FIXED_ROPES = ("default", "linear", "llama3", "yarn")  # whose angles do not follow the length
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.2}  # to the twin, of the largest number


def can_run(model: Any) -> bool:
    """Whether this decoder can be run natively, before any is replaced: fp32 or bf16 on a CPU,
    layers that merge, a plain LM head, whole panels, rotary angles that do not follow the text."""
    decoder, config = model.get_decoder(), model.config.get_text_config()
    layers = list(getattr(decoder, "layers", ()))
    if not layers or not all(is_plain_layer(layer) for layer in layers):
        return False
    if type(model.get_output_embeddings()) is not nn.Linear:
        return False
    weights = [p for p in model.parameters()]
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    attention, mlp = layers[0].self_attn, layers[0].mlp
    widths = (mlp.up_proj.out_features, attention.o_proj.out_features)
    width = attention.q_proj.out_features + 2 * attention.k_proj.out_features
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        len({p.dtype for p in weights} & set(DTYPES)) == 1
        and all(p.dtype == weights[0].dtype and p.device.type == "cpu" for p in weights)
        and sum(p.nbytes for p in weights) <= MOST_BYTES
        and rope in FIXED_ROPES
        and all(size % WIDEST_PANEL == 0 for size in (*widths, width))
        and attention.head_dim <= WIDEST
        and attention.o_proj.out_features <= LARGEST
        and attention.head_dim % 2 == 0
        and len(kinds) == 1
    )


def adopt(backbone: Any, heads: MedusaHeads | None, team: Team) -> bool:
    """Let a backbone whose model `can_run` decode natively, with its LM head, its Medusa heads and
    its judge; whether it does: not where the numbers differ from the twin's."""
    twin = backbone.decoder
    if not isinstance(twin, FusedDecoder):
        return False
    native = NativeDecoder(twin, list(backbone.cache.layers.layers), team)

    def difference() -> float:
        found = []
        for decoder in (twin, native):
            backbone.decoder = decoder
            backbone.cache.crop(0)
            ids = torch.arange(23) * 7 % backbone.vocabulary
            parts = [backbone.run_chunk(part) for part in ids.split([13, 1, 1, 8])]
            found.append(torch.cat(parts))
        backbone.cache.crop(0)
        return float((found[0] - found[1]).abs().max() / found[0].abs().max())

    with torch.inference_mode():
        limit = TOLERANCES[backbone.dtype]
        is_right = agrees("the decoder runs by torch's operators", difference, limit)
    backbone.decoder = native if is_right else twin
    if is_right:
        backbone.lm_head.linear = NativeLinear(backbone.lm_head.linear, team)
        backbone.judge = NativeJudge(team)
        own = None
        if heads is not None and heads.weight.dtype == backbone.dtype:
            own = heads.twin = NativeHeads(heads, backbone.lm_head, team)
        rows = len(backbone.lm_head.linear.weight)  # a drafted token must have an embedding
        if backbone.lm_head.is_plain and rows <= len(twin.stock.embed_tokens.weight):
            backbone.whole_step = NativeStep(backbone, native, own, team)
    return is_right
