"""Numbers of z-lab's own code for a random drafter, for tests/decoding/test_dflash.py.

    git clone https://github.com/z-lab/dflash; git -C dflash checkout 44947fbf
    PYTHONPATH=tests python -m support.reference_dflash dflash

prints reference_dflash.json, the states of two blocks, the second of which
has a cache of the first one's context.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch
from transformers import DynamicCache, Qwen3Config

from support import dflash_files

HIDDEN = 32


def context(start: int, count: int) -> torch.Tensor:
    """Taps of some tokens [count, 2 * HIDDEN]."""
    random = torch.Generator().manual_seed(7)
    return torch.randn(16, 2 * HIDDEN, generator=random)[start : start + count]


def block(seed: int) -> torch.Tensor:
    """Embeddings [BLOCK, HIDDEN]."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(dflash_files.BLOCK, HIDDEN, generator=random)


def main(checkout: Path) -> None:
    spec = importlib.util.spec_from_file_location("reference", checkout / "dflash" / "model.py")
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    settings = Qwen3Config(**dflash_files.config(HIDDEN), attn_implementation="eager")
    model = reference.DFlashDraftModel(settings).eval()
    model.load_state_dict(dflash_files.tensors(HIDDEN))
    kept, found = DynamicCache(), []
    with torch.inference_mode():
        for start, count, seed in ((0, 5, 1), (5, 3, 2)):
            end = start + count
            out = model(
                target_hidden=context(start, count)[None],
                noise_embedding=block(seed)[None],
                position_ids=torch.arange(start, end + dflash_files.BLOCK)[None],
                past_key_values=kept,
                use_cache=True,
                is_causal=False,
            )
            kept.crop(-dflash_files.BLOCK)
            found.append([[round(x, 5) for x in row[:4]] for row in out[0].tolist()])
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
