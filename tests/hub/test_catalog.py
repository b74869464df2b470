"""Known checkpoints and their chat templates: whole, unambiguous, and in the documented format."""

from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from medusa_chat.checkpoints.model_sizes import sizes
from medusa_chat.gguf_files import is_gguf, split_name
from medusa_chat.hub import catalog, is_repo_id
from medusa_chat.hub.catalog import (
    LAYOUTS,
    chat_template,
    known_drafters,
    known_template,
    model_preset,
    model_presets,
    repo_id_of,
    repo_of,
)

TALK = [
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "How are you?"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}]
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)


def test_presets_are_ids_layouts_and_sizes() -> None:
    ids = [preset.id for preset in model_presets()]
    assert len(ids) == len({name.lower() for name in ids}) >= 12
    for preset in model_presets():
        assert is_repo_id(preset.id) and preset.title and preset.layout in LAYOUTS
        assert (preset.base is None) == (preset.layout == "C")
        assert preset.base is None or is_repo_id(split_name(preset.base)[0])
        assert preset.bytes is None or preset.bytes > 10**8
        if preset.chat_template:
            assert chat_template(preset.chat_template)


def test_sizes_of_heads_are_what_their_shapes_say() -> None:
    """n (h h + h + V h) 2 bytes with own LM heads, without the V h when they are shared."""
    shapes = {
        "FasterDecoding/medusa-vicuna-7b-v1.3": (4096, 32000, 1),
        "FasterDecoding/medusa-vicuna-13b-v1.3": (5120, 32000, 1),
        "FasterDecoding/medusa-vicuna-33b-v1.3": (6656, 32000, 1),
        "abhigoyal/vllm-medusa-vicuna-7b-v1.3": (4096, 32000, 0),
        "joaogante/TinyLlama-1.1B-Chat-v1.0-medusa-wikitext": (2048, 32000, 1),
        "leptonai/TinyLlama-1.1B-Chat-v1.0-4heads": (2048, 32000, 0),
        "text-generation-inference/Mistral-7B-Instruct-v0.2-medusa": (4096, 32000, 1),
        "philschmid/llama-3-1-8b-instruct-medusa": (4096, 0, 1),
    }
    for name, (hidden, vocabulary, bias) in shapes.items():
        preset = model_preset(name)
        assert preset is not None and preset.heads and preset.bytes
        expected = preset.heads * hidden * (hidden + bias + vocabulary) * 2
        assert abs(preset.bytes - expected) < 100_000, name


def test_shapes_of_backbones_have_as_many_parameters_as_their_files() -> None:
    for preset in model_presets():
        assert preset.shape is not None, preset.id
        found = sizes(catalog.shape(preset.shape))
        if preset.base_bytes and not is_gguf(preset.base or ""):
            assert abs(2 * found.parameters / preset.base_bytes - 1) < 1e-5, preset.id


def test_heads_that_ship_name_what_is_fetched_for_them_and_the_repo_it_is_in() -> None:
    repo = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"
    assert repo_of("qwen-coder-0.5b") == f"{repo}/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    assert repo_id_of("qwen-coder-0.5b") == repo
    assert repo_id_of("smollm2") == repo_of("smollm2")
    assert repo_id_of("someone/thing") == repo_of("someone/thing") == "someone/thing"


def test_an_id_is_found_in_any_case_and_unknown_ones_are_none() -> None:
    preset = model_preset("fasterdecoding/MEDUSA-vicuna-7b-v1.3")
    assert preset is not None and preset.revision == "refs/pr/1"
    assert model_preset("nobody/nothing") is None


def rendered(name: str, messages: Any, ask: bool = True) -> str:
    """As transformers renders a chat template."""

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    template = environment.from_string(chat_template(name))
    values = {"messages": messages, "add_generation_prompt": ask}
    return template.render(**values, bos_token="<s>", eos_token="</s>")


def test_vicuna_is_the_format_of_fastchats_v1_1() -> None:
    conversation = "USER: Hello! ASSISTANT: Hi!</s>USER: How are you? ASSISTANT:"
    assert rendered("vicuna", TALK) == f"<s>{VICUNA} {conversation}"
    assert rendered("vicuna", SYSTEM + TALK) == f"<s>Be brief. {conversation}"
    assert rendered("vicuna", TALK[:2], ask=False) == (
        f"<s>{VICUNA} USER: Hello! ASSISTANT: Hi!</s>"
    )


@pytest.mark.parametrize("messages", [TALK[1:], TALK + TALK[2:], TALK[:1] + SYSTEM])
def test_vicuna_refuses_turns_that_do_not_alternate(messages: Any) -> None:
    with pytest.raises(ValueError, match="in turn"):
        rendered("vicuna", messages)


def test_zephyr_is_the_format_of_its_model_card() -> None:
    assert rendered("zephyr", SYSTEM + TALK) == (
        "<|system|>\nBe brief.</s>\n<|user|>\nHello!</s>\n<|assistant|>\nHi!</s>\n"
        "<|user|>\nHow are you?</s>\n<|assistant|>\n"
    )
    with pytest.raises(ValueError, match="roles"):
        rendered("zephyr", [{"role": "tool", "content": "x"}])


def test_an_answer_extends_the_prompt_that_asked_for_it() -> None:
    """Else a chat could not reuse what the model has read. Vicuna answers with a space first."""
    for name, answer in (("vicuna", " Hi!"), ("zephyr", "Hi!")):
        conversation = [TALK[0], {"role": "assistant", "content": answer}, TALK[2]]
        assert rendered(name, conversation).startswith(rendered(name, TALK[:1]) + answer + "</s>")


def test_a_repo_and_its_base_get_the_template_they_lack() -> None:
    base, heads = "lmsys/vicuna-7b-v1.3", "FasterDecoding/medusa-1.0-zephyr-7b-beta"
    assert known_template(base) == (base, chat_template("vicuna"))
    assert known_template("a/b", None, heads) == (heads, chat_template("zephyr"))
    assert known_template("TinyLlama/TinyLlama-1.1B-Chat-v1.0", None) is None


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "unsloth/Qwen3-8B-GGUF", "/models/Qwen3-8B-UD-Q4_K_XL.gguf"],
)
def test_the_drafters_of_a_model_are_found_by_its_repo_and_its_gguf_files(name: str) -> None:
    kinds = {drafter.kind for drafter in known_drafters(name)}
    assert {"DFlash", "DSpark", "EAGLE-3", "JetSpec", "draft model"} <= kinds
    of_gpt_oss = {drafter.kind for drafter in known_drafters("openai/gpt-oss-20b")}
    assert of_gpt_oss == {"DFlash", "EAGLE-3", "EAGLE-3.1", "JetSpec"}


@pytest.mark.parametrize("name", ["Qwen/Qwen3-80B", "demo", "", "Qwen/Qwen3-8B-Base", "x/Qwen3"])
def test_other_models_have_no_known_drafters(name: str) -> None:
    assert known_drafters(name) == ()
