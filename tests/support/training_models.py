"""A tiny backbone on disk for the training commands: a byte tokenizer whose last ids are the marks
of turns, a Llama of one layer, and conversations that have a pattern."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LETTERS = "abcdefghijklmnop"
SPECIAL = ["<pad>", "</s>", "<system>", "<user>", "<assistant>"]
CONTEXT = 128


def letter_tokenizer(
    template: str | None = TEMPLATE,
    special: Sequence[str] = SPECIAL,
    letters: str = f"{LETTERS} .",
) -> PreTrainedTokenizerFast:
    """A token a letter; anything else is <pad>. special: <pad>, </s> and the roles."""
    words = [*special, *letters]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=list(special[2:]),
        chat_template=template,
    )


def random_llama(vocabulary: int, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A Llama of one layer with random weights. changes: of its configuration."""
    values = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **(values | changes))).eval()


def write_backbone(
    folder: Path, template: str | None = TEMPLATE, tied: bool = False, **changes: Any
) -> Path:
    """A model whose answers go round the alphabet: after each letter the next one."""
    tokenizer = letter_tokenizer(template)
    values = {"tie_word_embeddings": tied, "bos_token_id": None, **changes}
    model = random_llama(len(tokenizer), **values)
    if not tied:
        plant_alphabet(model, len(SPECIAL))
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def plant_alphabet(model: LlamaForCausalLM, first: int) -> None:
    """The hidden state tells of the token alone, and the LM head says the letter after it."""
    model.model.layers[0].self_attn.o_proj.weight.zero_()
    model.model.layers[0].mlp.down_proj.weight.zero_()
    table = model.get_input_embeddings().weight
    table.copy_(torch.nn.functional.normalize(table, dim=-1))
    last = first + len(LETTERS) - 1
    nexts = [max(token - 1, 0) for token in range(len(table))]
    nexts[first] = last
    model.lm_head.weight.copy_(8 * table[nexts])
    model.lm_head.weight[0] = 0
    model.lm_head.weight[first] += 8 * table[4]  # an answer begins with "a"


def alphabet(start: int, length: int) -> str:
    return "".join(LETTERS[(start + i) % len(LETTERS)] for i in range(length))


def conversations(count: int = 24) -> list[dict[str, Any]]:
    """Conversations of two turns whose answers go round the alphabet."""
    rows = []
    for number in range(count):
        asked = (alphabet(number, 3 + number % 3), alphabet(number + 5, 2))
        answers = (alphabet(number, 12 + number % 5), alphabet(number + 7, 9))
        messages = []
        for question, answer in zip(asked, answers, strict=True):
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        rows.append({"messages": messages})
    return rows


def write_rows(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file
