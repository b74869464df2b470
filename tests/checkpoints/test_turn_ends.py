"""The tokens that end a turn, by templates of the shapes that well-known models have."""

from types import SimpleNamespace

import pytest
from support.tokenizers import byte_tokenizer
from transformers import GenerationConfig, LlamaConfig

from medusa_chat.checkpoints.turn_ends import end_tokens

OPEN = "{% if add_generation_prompt %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    + OPEN
    + "<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    + OPEN
    + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA4 = (
    "<bos>{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.reasoning and loop.last %}<|channel>thought\n{{ m.reasoning }}\n<channel|>{% endif %}"
    "{{ m.content | trim }}<turn|>\n{% endfor %}" + OPEN + "<|turn>model\n{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif loop.last and not add_generation_prompt %}{% if 'thinking' in m %}<|start|>assistant"
    "<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>"
    "final<|message|>{{ m.content }}<|return|>{% else %}<|start|>assistant<|channel|>final"
    "<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    + OPEN
    + "<|start|>assistant{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    + OPEN
    + "<|assistant|>\n{% endif %}"
)
COHERE = (
    "{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'assistant' %}<|CHATBOT_TOKEN|>"
    "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% else %}<|USER_TOKEN|>{{ m.content }}"
    "{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
    + OPEN
    + "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
SHOUTED = "{% for m in messages %}{{ m.content | upper }}<|end_of_turn|>{% endfor %}"
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('no') }}{% endif %}{{ m.content }}\n\n<|eom|>{% endfor %}"
)
TOOLS = "{% for m in messages %}{{ m['tool'].name }}{% endfor %}"  # fails


def tokens_that_end(template, told=(), **more):
    """The texts of the ends, where the files tell `told` and the template is as given."""
    tokenizer = byte_tokenizer()
    names = {name for name in NAMES if name in (template or "")} | {*told, *more.values()}
    names |= {f"<|{role}|>" for role in ("user", "assistant") if template == GLM}
    tokenizer.add_tokens(["\n\n"])  # as Gemma has it
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(names)})
    tokenizer.chat_template = template
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in names}
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=ids.get(more.get("config")))
    if "tokenizer" in more:
        tokenizer.eos_token = more["tokenizer"]
    generation = GenerationConfig(eos_token_id=[ids[name] for name in told] or None)
    model = SimpleNamespace(config=config, generation_config=generation)
    return {tokenizer.convert_ids_to_tokens(token) for token in end_tokens(model, tokenizer)}


NAMES = (
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|begin|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"),
    *("<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|return|>", "[gMASK]", "<sop>"),
    *("<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>", "<|START_RESPONSE|>"),
    *("<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>", "<s>", "</s>", "<|end_of_turn|>", "<|eom|>"),
)


@pytest.mark.parametrize(
    ("template", "told", "expected"),
    [
        (CHATML, ["<|endoftext|>"], {"<|im_end|>", "<|endoftext|>"}),
        (LLAMA3, [], {"<|eot_id|>"}),
        (GEMMA4, ["<eos>"], {"<turn|>", "<eos>"}),
        # the eot id of a GGUF file may be <|end|>, which ends a channel too
        (GPT_OSS, ["<|end|>", "<|call|>"], {"<|return|>", "<|call|>"}),
        (GLM, ["<|endoftext|>"], {"<|user|>", "<|endoftext|>"}),
        (COHERE, ["<|END_OF_TURN_TOKEN|>"], {"<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"}),
        (LLAMA2, [], {"</s>"}),
        (SHOUTED, [], {"<|end_of_turn|>"}),
        (ALTERNATING, [], {"<|eom|>"}),
        (TOOLS, ["</s>"], {"</s>"}),
        (None, ["</s>"], {"</s>"}),
    ],
)
def test_a_turn_ends_where_its_template_ends_it_and_not_inside(template, told, expected):
    assert tokens_that_end(template, told) == expected


def test_every_file_may_name_ends():
    found = tokens_that_end(None, ["<|a|>"], config="<|b|>", tokenizer="<|c|>")
    assert found == {"<|a|>", "<|b|>", "<|c|>"}


def test_an_only_end_is_kept_wherever_the_template_writes_it():
    inside = "{% for m in messages %}</s>{{ m.content }}{% endfor %}"
    assert tokens_that_end(inside, ["</s>"]) == {"</s>"}
