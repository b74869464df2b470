"""bench: every study gives rows that say what they are. No figure of this file is a measurement."""

from dataclasses import replace
from inspect import signature

import pytest
from support.gguf_models import tiny_model, write_gguf
from support.loading import loaded

from medusa_chat.bench import STUDIES, run, run_shape, table
from medusa_chat.bench import steps as step_times
from medusa_chat.bench.answers import Question
from medusa_chat.bench.random_model import SHAPES, RandomModel, load_shape
from medusa_chat.bench.rows import row, unmeasured
from medusa_chat.bench.speed import OURS, _ours
from medusa_chat.bench.step_costs import StepCosts
from medusa_chat.bench.steps import bytes_read
from medusa_chat.checkpoints.model_sizes import sizes
from medusa_chat.checkpoints.prepare import is_native
from medusa_chat.checkpoints.tree_check import check_steps
from medusa_chat.decoding.backends.native_layers import PackedEmbedding
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import Fresh, LoadRequest
from medusa_chat.runtime.reply import reply
from medusa_chat.runtime.requests import Reply
from medusa_chat.trees.presets import load_tree

TINY = RandomModel("tiny", 32, 64, 2, 4, 2, 96, 512, heads=5)
CPU = LoadRequest(device="cpu", precision="fp32")
QUIET = {"rounds": 1, "progress": lambda message: None, "budget": 0.0}


@pytest.fixture(autouse=True)
def costs(monkeypatch):
    """Step times are made up (the real ones are test_step_profiler.py's)."""
    sizes = (1, 4, 8, 16, 24, 32, 48, 64)
    made = StepCosts(sizes, (128,), (tuple(0.001 * (1 + 0.02 * n) for n in sizes),))

    def times(*_):
        yield None
        yield made

    monkeypatch.setattr(step_times, "time_steps", times)
    return made


def by_name(result):
    return {row["name"]: row for row in result["rows"]}


def test_every_study_but_the_race_fills_its_rows_on_a_tiny_model(request_of):
    studies = [name for name in STUDIES if name not in ("speed", "load")]
    result = run(request_of, max_new_tokens=8, tree="auto", studies=studies, **QUIET)
    rows = by_name(result)
    for name in ("step of 1 node", "step of 16 nodes"):
        assert rows[name]["value"] > 0, name
    assert rows["step of 1 node"]["ratio"] == 1
    assert rows["first token of a later turn"]["against"] == "a bare pass over these 24"
    assert "not measured: the context holds 256 tokens" in table(result)
    assert result["machine"]["device"].startswith("cpu (")


@pytest.mark.parametrize("name", OURS)
def test_the_race_decodes_as_the_page_does(context, name, monkeypatch):
    """With the same details and texts as `reply`, which the page and `generate` use."""
    loaded, asked = context.loaded, []
    real = loaded.engine.generate

    def spied(*args, **options):
        found = signature(real).bind(*args, **options)
        found.apply_defaults()
        asked.append((found.arguments["details"], found.arguments["texts"]))
        return real(*args, **options)

    monkeypatch.setattr(loaded.engine, "generate", spied)
    drafter = "none" if name == "plain" else name
    settings = GenerationSettings(drafter=drafter, max_new_tokens=4, seed=0)
    list(reply(loaded, Reply(Fresh([{"role": "user", "content": "Hello"}]), settings)))
    of_the_page = asked[:1]
    asked.clear()
    _ours(name, context).answer(Question([1, 2, 3], ""))
    assert asked == of_the_page == [(True, loaded.texts)]


def test_a_load_is_measured_in_a_process_of_its_own(study):
    rows = study("load")
    assert rows["load"]["value"] > 0
    assert rows["peak memory"]["value"] > 0


def test_a_shape_is_measured_without_any_download(monkeypatch):
    monkeypatch.setattr(step_times, "CONTEXTS", (128, 256, 1024))
    result = run_shape(TINY, CPU, layers=1, **QUIET)
    rows = by_name(result)
    assert (
        "random weights" in result["machine"]["model"] and "1 layers" in result["machine"]["model"]
    )
    assert rows["end to end"]["value"] is None
    assert rows["step of 64 nodes"]["ratio"] > 0
    assert rows["step of 1 node"]["value"] > 0


def test_a_shapes_weights_are_random_and_decode_as_themselves():
    loaded = load_shape(TINY, CPU)
    check_steps(loaded.engine.backbone)
    for name, parameter in loaded.engine.backbone.model.named_parameters():
        assert "norm" in name or float(parameter.std()) > 0.01, name
    answers = {}
    for drafter in ("none", "medusa"):
        settings = GenerationSettings(drafter=drafter, max_new_tokens=12, seed=0, nodes=16)
        maker = loaded.engine.drafter(settings, load_tree("sparse-16"))
        *_, last = loaded.engine.generate([5, 9, 13], maker, settings)
        answers[drafter] = last.token_ids
    assert answers["none"] == answers["medusa"] and len(answers["none"]) == 12


@pytest.mark.parametrize(("name", "billions"), [("7b", 6.74), ("8b", 8.03)])
def test_shapes_have_the_sizes_they_are_named_for(name, billions):
    shape = SHAPES[name]
    config = {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.attention,
        "num_key_value_heads": shape.key_values,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": False,
    }
    assert sizes(config).parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_a_plain_step_reads_every_weight_but_the_embedding():
    loaded = load_shape(TINY, CPU)
    whole = loaded.info.parameters * 4
    needed = whole - TINY.vocabulary * TINY.hidden * 4
    # Panels of so small matrices are filled up to whole vectors, which differ between processors.
    assert needed <= bytes_read(loaded.engine) < 1.1 * needed


@pytest.mark.parametrize("ties", [False, True])
def test_a_plain_step_reads_a_packed_table_only_where_it_is_the_lm_head(ties, library, tmp_path):
    model = tiny_model(hidden_size=256, intermediate_size=256, tie_word_embeddings=ties)
    made = loaded(write_gguf(tmp_path / "a.gguf", model, "Q4_0"), device="cpu", precision="auto")
    assert isinstance(made.engine.backbone.model.get_input_embeddings(), PackedEmbedding)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    matrices -= 0 if ties else model.get_input_embeddings().weight.numel()
    assert bytes_read(made.engine) == pytest.approx(matrices * 18 / 32, rel=0.1)


def test_a_shape_in_4_bits_is_multiplied_in_c(library):
    loaded = load_shape(TINY, replace(CPU, precision="nf4"))
    assert is_native(loaded.engine.backend) and loaded.info.precision == "nf4"
    assert any("rounded to 4 bits" in note for note in loaded.info.notes)


def test_a_shape_in_4_bits_is_refused_in_words_without_a_compiler(monkeypatch):
    monkeypatch.setenv("MEDUSA_CHAT_NATIVE", "0")
    with pytest.raises(UsageError, match="--shape takes"):
        load_shape(TINY, replace(CPU, precision="nf4"))


def test_an_unknown_study_is_refused_before_it_costs_anything():
    with pytest.raises(UsageError, match="choose one of steps"):
        run_shape(TINY, CPU, studies=("speeed",), **QUIET)


def test_rows_that_were_not_measured_are_shown_and_not_left_out():
    rows = [row("a", [1.0, 3.0, 2.0], "ms"), unmeasured("b", "ms", "no GPU")]
    lines = table({"machine": {"device": "a CPU"}, "rows": rows}).splitlines()
    assert lines[0] == "device: a CPU"
    assert any(line.startswith("b ") and "not measured: no GPU" in line for line in lines)
    assert rows[0]["value"] == 2.0 and (rows[0]["min"], rows[0]["max"]) == (1.0, 3.0)
    assert set(rows[0]) == set(rows[1])
