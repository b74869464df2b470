"""bench: every study gives rows that say what they are. No figure of this file is a measurement."""

import json
import shutil
import sys
from dataclasses import replace
from inspect import signature
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from medusa_chat.bench import STUDIES, chart_svg, run, run_shape, table
from medusa_chat.bench.harness.random_model import SHAPES, RandomModel, load_shape
from medusa_chat.bench.harness.report_data import Question
from medusa_chat.bench.harness.rows import row, unmeasured
from medusa_chat.bench.studies import paper_figures as findings_module
from medusa_chat.bench.studies import roofline as roofline_module
from medusa_chat.bench.studies import step_times
from medusa_chat.bench.studies.speed import OURS, _ours
from medusa_chat.bench.studies.step_times import bytes_read
from medusa_chat.checkpoints.head_tensors import heads_of, tensors_of
from medusa_chat.checkpoints.model_sizes import sizes
from medusa_chat.checkpoints.prepare import is_native
from medusa_chat.checkpoints.tree_check import check_steps
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step_costs import StepCosts
from medusa_chat.errors import UsageError
from medusa_chat.messages import Fresh, LoadRequest
from medusa_chat.runtime import tuner
from medusa_chat.runtime.reply import reply
from medusa_chat.runtime.requests import Reply
from medusa_chat.trees import tuning_store
from medusa_chat.trees.presets import load_tree

TINY = RandomModel("tiny", 32, 64, 2, 4, 2, 96, 512, heads=5)
CPU = LoadRequest(device="cpu", precision="fp32")
QUIET = {"rounds": 1, "progress": lambda message: None, "budget": 0.0}


@pytest.fixture(autouse=True)
def costs(monkeypatch):
    """Step times are made up (the real ones are test_tuner.py's), the bandwidth's buffer small."""
    sizes = (1, 4, 8, 16, 24, 32, 48, 64)
    made = StepCosts(sizes, (128,), (tuple(0.001 * (1 + 0.02 * n) for n in sizes),))

    def times(*_):
        yield None
        yield made

    monkeypatch.setattr(step_times, "BUFFER", {"cpu": 2**20})
    monkeypatch.setattr(step_times, "time_steps", times)
    monkeypatch.setattr(tuner, "time_steps", times)
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
    assert 0 < rows["host gap in a step, plain"]["value"] < 1
    assert "PUBLISHED" in rows["tuned / plain, expected"]["note"]
    assert result["machine"]["device"].startswith("cpu (")
    kept = list(tuning_store.all_tunings())
    assert len(kept) == 1 and kept[0].place.model == request_of.checkpoint


def test_the_roofline_is_the_slower_of_reading_and_multiplying(study, context, monkeypatch):
    monkeypatch.setattr(roofline_module, "read_rates", lambda context: [1e9, 2e9])
    monkeypatch.setattr(roofline_module, "_peak", lambda context: 4e9)
    rows, weights = study("roofline"), bytes_read(context.loaded.engine)
    named = AutoModelForCausalLM.from_pretrained(context.request.checkpoint).named_parameters()
    multiplied = sum(p.numel() for name, p in named if "embed_tokens" not in name)
    for nodes, label in ((1, "step of 1 node"), (8, "step of 8 nodes")):
        least = 1e3 * max(weights / 2e9, 2 * multiplied * nodes / 4e9)
        assert rows[label]["ratio"] == pytest.approx(rows[label]["value"] / least)
    assert "reading" in rows["step of 1 node"]["note"]
    assert "arithmetic" in rows["step of 8 nodes"]["note"]


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


def test_a_shape_has_a_roofline_where_it_is_named():
    rows = by_name(run_shape(TINY, CPU, layers=1, studies=("roofline",), **QUIET))
    assert rows["step of 1 node"]["against"] == "the roofline" and "step behind 1k" not in rows


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
    assert bytes_read(loaded.engine) == whole - TINY.vocabulary * TINY.hidden * 4


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


@pytest.mark.parametrize("name", ["ladder", "trees", "thresholds", "temperatures", "hardware"])
def test_every_finding_fills_its_rows(study, name, monkeypatch):
    monkeypatch.setattr(findings_module, "SIZES", (8, 16))
    monkeypatch.setattr(findings_module, "DENSE_EACH", 1)
    measured = [found for found in study(name).values() if found["value"] is not None]
    assert len(measured) >= 7
    for found in measured:
        assert found["min"] <= found["value"] <= found["max"], found
        assert name in found["command"]


def test_temperatures_are_measured_for_every_acceptance(study):
    rows = study("temperatures")
    assert len(rows) == 15 and {"exact at 0.0", "typical-sampled at 1.0"} <= set(rows)
    assert all(1 <= row["value"] <= 6 for row in rows.values())  # five heads at most


def test_categories_are_those_of_the_file(study, tmp_path):
    file = tmp_path / "questions.jsonl"
    kinds = ["writing", "maths", "writing"]
    lines = [json.dumps({"category": kind, "turns": ["hello", "again"]}) for kind in kinds]
    file.write_text("\n".join(lines), "utf-8")
    rows = study("categories", prompts=file)
    assert set(rows) == {"maths", "maths: speed", "writing", "writing: speed"}
    assert study("categories")["speedup by category"]["value"] is None


def test_the_model_of_hardware_prints_the_papers_intensities(study):
    rows = study("hardware")
    assert rows["33B linear, batch 1, q 1"]["value"] == pytest.approx(1.0, abs=0.01)
    assert "MODEL" in rows["7B on H200"]["note"]


CHECKOUT = """
import torch
from torch import nn
from transformers import AutoTokenizer, LlamaForCausalLM

class ResBlock(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)

def initialize_medusa(ids, model):
    return model(ids).logits

class MedusaModelLlama(LlamaForCausalLM):
    def __init__(self, config):
        config.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_theta}
        super().__init__(config)
        self.medusa_head = nn.ModuleList()
        self.tokenizer = AutoTokenizer.from_pretrained(config._name_or_path)

    def medusa_generate(self, input_ids, temperature, medusa_choices):
        start, whole = input_ids.shape[1], input_ids
        logits = initialize_medusa(input_ids, self)
        while True:
            whole = torch.cat((whole, logits[:, -1:].argmax(-1)), 1)
            yield {"text": self.tokenizer.decode(whole[0, start:])}
            logits = self(whole).logits
"""


def test_a_checkout_of_the_reference_decodes_with_our_weights_and_is_counted(study, tmp_path):
    code = tmp_path / "medusa" / "model"
    code.mkdir(parents=True)
    (code / "medusa_model.py").write_text(CHECKOUT, "utf-8")
    rows = study("reference", reference=tmp_path)
    sizes = sorted(
        int(name.split()[2]) for name in rows if name.endswith("nodes") and "the" in name
    )
    assert sizes, rows
    for size in sizes:
        assert rows[f"the reference, {size} nodes"]["value"] == 1  # it decodes plainly
        assert "6 of 6 answers are the same" in rows[f"medusa, {size} nodes"]["note"]
    assert "medusa.model.medusa_model" not in sys.modules


def test_a_folder_that_is_no_checkout_of_the_reference_is_refused(study, tmp_path):
    with pytest.raises(UsageError, match="not a checkout of FasterDecoding/Medusa"):
        study("reference", reference=tmp_path)
    row = study("reference")["medusa / the reference"]
    assert row["value"] is None and "--reference DIR" in row["note"]


def test_heads_that_read_the_root_are_not_timed_as_the_references(study, request_of, tmp_path):
    """The reference would leave out the part that it does not know, and draft something else."""
    shutil.copytree(request_of.checkpoint, tmp_path / "model")
    file = tmp_path / "model" / "medusa_lm_head.safetensors"
    heads = heads_of(load_file(file))
    heads.root_weight = torch.nn.Parameter(torch.zeros(len(heads), *heads.weight.shape[2:]))
    save_file(tensors_of(heads), file)
    other = replace(request_of, checkpoint=str(tmp_path / "model"))
    row = study("reference", other, reference=tmp_path)["medusa / the reference"]
    assert row["value"] is None and "--no-root" in row["note"]


def test_the_ladder_has_a_step_for_medusa_2_where_its_checkpoint_is_named(study, request_of):
    rows = study("ladder", medusa_2=Path(request_of.checkpoint))
    joint = [name for name in rows if name.startswith("Medusa-2")]
    assert len(joint) == 2 and all(rows[name]["value"] for name in joint)
    assert study("ladder")["Medusa-2"]["value"] is None


def test_the_picture_has_a_bar_for_every_measured_row_and_no_text_of_others():
    rows = [
        row("a <b>", [1.0, 2.0], "ms", "a <b>", [1.0, 2.0]),
        row("c", [4.0, 3.0], "ms", "a <b>", [1.0, 2.0]),
        unmeasured("d", "ms", "why"),
    ]
    text = chart_svg({"rows": rows, "machine": {"model": "x & y", "device": "cpu"}})
    found = ElementTree.fromstring(text)
    bars = [node for node in found.iter() if node.get("class") in ("bar", "base")]
    assert [node.get("class") for node in bars] == ["base", "bar"]
    assert float(bars[1].get("width")) > 2 * float(bars[0].get("width"))
