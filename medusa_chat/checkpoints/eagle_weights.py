"""An EAGLE drafter's modules, from its file."""

import re

import torch
from torch import nn

from medusa_chat.checkpoints.drafter_weights import decoder_of, ids_of, linear, norm, tensors_of
from medusa_chat.checkpoints.layouts.drafter_file import Sizes
from medusa_chat.checkpoints.layouts.eagle_file import EagleFile
from medusa_chat.decoding.drafters.eagle_model import EagleForm, EagleModel
from medusa_chat.decoding.drafters.own_layers import Lent
from medusa_chat.errors import ModelError

WIDE = re.compile(r"0\.self_attn\.[qkv]_proj")


def form_of(found: EagleFile, sizes: Sizes) -> EagleForm:
    """The form of a drafter for a backbone. Raises ModelError."""
    found.refuse_other(sizes)
    taps = found.taps(found.tap_count(sizes.hidden), sizes.layers) if found.reads_taps else ()
    said = found.said
    return EagleForm(taps, bool(said("norm_before_residual")), bool(said("norm_output")))


def read_eagle(
    found: EagleFile, lent: Lent, sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> EagleModel:
    """The drafter's modules on a device. lent: for a file that has no tables of its own. Raises
    ModelError."""
    form, tensors = form_of(found, sizes), tensors_of(found, device, dtype)
    width = found.shapes["fc.weight"][0]
    own = tensors.get("embed_tokens.weight")
    if own is None and width != sizes.hidden:
        raise ModelError(f"{found.path} lacks embed_tokens.weight: download it again")
    logits = tensors.get("lm_head.weight")
    vocabulary = sizes.vocabulary if logits is None else len(logits)
    decoder = decoder_of(
        found,
        width,
        tensors,
        device,
        is_wide=lambda name: bool(form.taps and WIDE.fullmatch(name)),
        may_lack="" if form.taps else "layers.0.input_layernorm",
    )
    eps = decoder.config.rms_norm_eps
    return EagleModel(
        form,
        decoder,
        linear(tensors["fc.weight"], tensors.get("fc.bias")),
        [norm(tensors[name], eps) for name in sorted(tensors) if name.startswith("fc_norm.")]
        or [norm(tensors[name], eps) for name in tensors if name == "input_norm.weight"],
        norm(tensors["layers.0.hidden_norm.weight"], eps) if form.taps else None,
        norm(tensors["norm.weight"], eps) if "norm.weight" in tensors else None,
        None if own is None else nn.Embedding.from_pretrained(own),
        None if logits is None else linear(logits, None),
        lent,
        vocabulary,
        ids_of(tensors.get("d2t"), vocabulary, found, device),
    ).requires_grad_(False)
