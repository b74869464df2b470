"""A DFlash drafter's modules, from its file."""

import torch
from torch import nn

from medusa_chat.checkpoints.drafter_weights import decoder_of, ids_of, linear, norm, tensors_of
from medusa_chat.checkpoints.layouts.dflash_file import DFlashFile
from medusa_chat.checkpoints.layouts.drafter_file import Sizes
from medusa_chat.decoding.drafters.dflash_model import DFlashForm, DFlashModel, Markov
from medusa_chat.decoding.drafters.own_layers import Lent
from medusa_chat.errors import ModelError


def form_of(found: DFlashFile, layers: int) -> DFlashForm:
    """The form of a drafter for a backbone of so many layers. Raises ModelError."""
    return DFlashForm(
        taps=found.taps(layers),
        block=found.block,
        mask=found.mask,
        windows=found.windows,
        is_causal=found.is_causal,
        reads_root=found.reads_root,
    )


def read_dflash(
    found: DFlashFile, lent: Lent, sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> DFlashModel:
    """The drafter's modules on a device. lent: for a file that has no tables of its own. Raises
    ModelError."""
    found.refuse_other(sizes)
    tensors = tensors_of(found, device, dtype, family="qwen3")
    decoder = decoder_of(found, sizes.hidden, tensors, device)
    own, logits = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    vocabulary = sizes.vocabulary if logits is None else len(logits)
    eps, markov = decoder.config.rms_norm_eps, None
    if "markov_head.markov_w1.weight" in tensors:
        before, after = (tensors[f"markov_head.markov_w{place}.weight"] for place in (1, 2))
        if len(after) != vocabulary:  # of the backbone's LM head, where it has none of its own
            raise ModelError(
                f"{found.path} adds to {len(after):,} tokens what stands before them, and "
                f"{vocabulary:,} are drafted: give the backbone that it was trained on"
            )
        markov = Markov(nn.Embedding.from_pretrained(before), linear(after, None))
    return DFlashModel(
        form_of(found, sizes.layers),
        decoder,
        linear(tensors["fc.weight"], None),
        norm(tensors["hidden_norm.weight"], eps),
        norm(tensors["norm.weight"], eps),
        None if own is None else nn.Embedding.from_pretrained(own),
        None if logits is None else linear(logits, None),
        markov,
        lent,
        vocabulary,
        ids_of(tensors.get("d2t"), vocabulary, found, device),
    ).requires_grad_(False)
