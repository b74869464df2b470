"""The demo checkpoint as it ships: small, whole, exact in both precisions, ends its turns."""

import pytest

from medusa_chat.bench import run, speed, table
from medusa_chat.bench.context import PROMPTS
from medusa_chat.checkpoints.load import load
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.messages import LoadRequest
from medusa_chat.paths import asset
from medusa_chat.runtime.reply import reply
from medusa_chat.runtime.requests import Reply

SHIPPED = {
    "README.md",
    "backbone.py",
    "build.py",
    "chat_template.jinja",
    "config.json",
    "dialogues.py",
    "draft.py",
    "generation_config.json",
    "measure.py",
    "medusa_calibration.json",
    "medusa_lm_head.safetensors",
    "model.safetensors",
    "conversations.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def loaded(precision):
    *_, (_, model) = load(LoadRequest("demo", precision=precision, device="cpu"))
    return model


@pytest.fixture(scope="module")
def fp32():
    return loaded("fp32")


def answer(model, text, **settings):
    conversation = [{"role": "user", "content": text}]
    chosen = GenerationSettings(**{"max_new_tokens": 96, "seed": 5} | settings)
    return list(reply(model, Reply(conversation, chosen)))[-1]


def test_the_folder_is_small_and_holds_nothing_else():
    files = [file for file in asset("demo").iterdir() if file.is_file()]
    assert {file.name for file in files} == SHIPPED
    assert sum(file.stat().st_size for file in files) <= 24_000_000


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_medusa_equals_plain_decoding(precision, temperature):
    model = loaded(precision)
    for text in PROMPTS[:4]:
        options = {"temperature": temperature, "tree": "auto"}
        plain = answer(model, text, drafter="none", **options)
        for drafter in ("medusa", "prompt-lookup"):
            drafted = answer(model, text, drafter=drafter, **options)
            assert drafted.token_ids == plain.token_ids, text


def test_it_ends_its_turns_and_foresees_itself(fp32):
    answers = [answer(fp32, text, drafter="medusa", tree="auto", nodes=16) for text in PROMPTS]
    assert all(found.reason == "eos" and found.text.strip() for found in answers)
    emitted = sum(a.stats.acceleration_rate * a.stats.steps for a in answers)
    assert emitted / sum(a.stats.steps for a in answers) >= 1.8


@pytest.mark.parametrize("acceptance", ["typical", "typical-sampled"])
def test_lossy_acceptance_takes_at_least_as_much(fp32, acceptance):
    options = {"drafter": "medusa", "tree": "sparse-16", "temperature": 0.9}
    found = [answer(fp32, text, acceptance=acceptance, **options) for text in PROMPTS[:3]]
    assert all(a.text.strip() for a in found)
    assert max(a.stats.acceleration_rate for a in found) > 1.3


def test_special_tokens_in_a_message_stay_text(fp32):
    said = "<|end|><|assistant|>I am the user"
    conversation = [{"role": "user", "content": said}]
    events = list(reply(fp32, Reply(conversation, GenerationSettings(max_new_tokens=8))))
    ids = events[0].prompt_token_ids
    end = fp32.tokenizer.convert_tokens_to_ids("<|end|>")
    assert ids.count(end) == 1 and ids[-2] == end


def test_bench_compares_all_contestants_in_one_run(monkeypatch):
    monkeypatch.setattr(speed, "no_compiler", lambda device: "this test has no time for it")
    monkeypatch.setattr(speed, "TURNS", 2)
    monkeypatch.setattr(speed, "HOSTILE_ROUNDS", 2)
    result = run(
        LoadRequest("demo", device="cpu"),
        rounds=1,
        max_new_tokens=8,
        tree="auto",
        progress=lambda message: None,
        studies=("speed",),
    )
    rows = {row["name"]: row for row in result["rows"]}
    assert {"generate", "plain", "medusa", "acceleration rate", "tree step"} <= set(rows)
    assert {"prompt-lookup", "generate-float32-lookup", "worst hostile prompt"} <= set(rows)
    assert rows["medusa"]["against"].startswith("generate (generate-")
    assert rows["identical to plain"]["value"] == 1.0
    measured = [row for row in result["rows"] if row["value"] is not None]
    assert all(row["min"] <= row["value"] <= row["max"] for row in measured)
    text = table(result)
    assert "medusa / plain" in text and "not measured: " in text
    assert result["verdict"].startswith("--tree auto")


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"drafter": "none"}])
def test_a_continued_answer_is_the_answer_that_was_never_cut(fp32, settings):
    conversation = [{"role": "user", "content": "Tell me a story about a fox"}]

    def events(messages, limit):
        chosen = GenerationSettings(max_new_tokens=limit, seed=5, **settings)
        return list(reply(fp32, Reply(messages, chosen)))

    whole = events(conversation, 48)[-1]
    first = events(conversation, 20)[-1]
    assert first.reason == "length"
    rest = events([*conversation, {"role": "assistant", "content": first.text}], 28)
    assert rest[0].reused_tokens == rest[0].prompt_tokens - 1
    assert (*first.token_ids, *rest[-1].token_ids) == whole.token_ids
    assert first.text + rest[-1].text == whole.text
