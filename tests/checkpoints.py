"""Writes small whole checkpoints: a tiny Llama, a byte tokenizer, random Medusa heads."""

from pathlib import Path

import torch
from families import tiny
from safetensors.torch import save_file
from test_text import byte_tokenizer

from medusa_chat.decoding.heads import MedusaHeads

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def write_checkpoint(folder: Path, heads: int = 3, template: str | None = TEMPLATE) -> Path:
    """A folder that loads; `heads` 0 leaves them out."""
    model = tiny("llama", vocab_size=256, max_position_embeddings=256, initializer_range=0.2)
    model.generation_config.eos_token_id = 255
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    if heads:
        write_heads(folder, MedusaHeads(heads, 32))
    return folder


def write_heads(folder: Path, heads: MedusaHeads) -> None:
    """Heads with small random weights, in the layout that shares the LM head."""
    torch.manual_seed(0)
    torch.nn.init.normal_(heads.weight, std=0.1)
    save_file(heads.to_tensors(), folder / "medusa_lm_head.safetensors")
