"""What is loaded, and what is refused in one line."""

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import TEMPLATE, write_checkpoint, write_heads
from support.loading import answer, loaded

from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.places import folder_or_repo
from medusa_chat.decoding.backends.replacements import PackedLinear
from medusa_chat.decoding.fused_layers import FusedLayer
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import DeviceError, MedusaChatError, ModelError, UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.prompt import encode
from medusa_chat.runtime.reply import resolve


def test_a_whole_folder_loads_and_decodes_alike_with_every_drafter(folder):
    model = loaded(folder)
    assert model.info.heads == 3 and model.info.nodes == 4
    drafters = ("none", "medusa", "prompt-lookup")
    texts = {answer(model, drafter=d, temperature=1.0)[-1].token_ids for d in drafters}
    assert len(texts) == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16", "int8", "nf4"])
def test_every_precision_loads_and_medusa_equals_plain(folder, precision):
    model = loaded(folder, precision=precision)
    events = answer(model, drafter="medusa")
    assert events[0].precision == precision
    assert len(events[-1].token_ids) == 20
    if precision in ("bf16", "fp16"):
        assert events[-1].token_ids == answer(model, drafter="none")[-1].token_ids


def test_heads_of_their_own_folder_need_a_backbone(folder, tmp_path):
    alone = tmp_path / "heads"
    alone.mkdir()
    (folder / "medusa_lm_head.safetensors").rename(alone / "medusa_lm_head.safetensors")
    with pytest.raises(ModelError, match="--backbone"):
        loaded(alone)
    assert loaded(alone, backbone=str(folder)).info.heads == 3
    assert loaded(folder).info.heads == 0


def test_own_lm_heads_load_and_equal_shared_ones(folder):
    shared = answer(loaded(folder, precision="fp32"), drafter="medusa", nodes=4)
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    lm_head = load_file(folder / "model.safetensors")["lm_head.weight"]
    own = {f"{head}.1.weight": lm_head.clone() for head in range(3)}
    save_file(tensors | own, folder / "medusa_lm_head.safetensors")
    mine = answer(loaded(folder, precision="fp32"), drafter="medusa", nodes=4)
    assert [e.draft.tokens for e in mine[1:-1]] == [e.draft.tokens for e in shared[1:-1]]


def remove(name):
    return lambda folder: (folder / name).unlink()


def truncate(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-300])


def replace_text(name, text):
    return lambda folder: (folder / name).write_text(text)


def drop_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_config(**values):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


def heads_of(heads):
    return lambda folder: write_heads(folder, heads)


def spoil_heads(value):
    def spoil(folder):
        tensors = load_file(folder / "medusa_lm_head.safetensors")
        tensors["1.0.linear.bias"][3] = value
        save_file(tensors, folder / "medusa_lm_head.safetensors")

    return spoil


def rename_heads(folder):
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    save_file({f"x.{n}": t for n, t in tensors.items()}, folder / "medusa_lm_head.safetensors")


def lose_a_head(folder):
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    kept = {n: t for n, t in tensors.items() if not n.startswith("1.")}
    save_file(kept, folder / "medusa_lm_head.safetensors")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (remove("config.json"), "no config.json"),
        (remove("model.safetensors"), "has only Medusa heads"),
        (remove("tokenizer.json"), "no tokenizer"),
        (truncate("model.safetensors"), "is broken: its tensors need"),
        (truncate("medusa_lm_head.safetensors"), "is broken: its tensors need"),
        (replace_text("config.json", "{"), "is not valid JSON"),
        (replace_text("config.json", "{}"), "no model_type"),
        (replace_text("tokenizer.json", "{}"), "tokenizer .* is broken"),
        (replace_text("medusa_calibration.json", "[]"), "not a valid calibration"),
        (drop_tensor, "lack model.layers.0.mlp.up_proj.weight"),
        (change_config(model_type="mamba"), "mamba"),
        (change_config(model_type="no-such-family"), "cannot be read"),
        (change_config(layer_types=["linear_attention"] * 2), "recurrent state"),
        (heads_of(MedusaHeads(3, 16)), "hidden size 16 and the backbone has 32"),
        (heads_of(MedusaHeads(2, 32, vocabulary=99)), "for 99 tokens"),
        (spoil_heads(torch.nan), "NaN or infinity"),
        (spoil_heads(torch.inf), "NaN or infinity"),
        (rename_heads, "unexpected tensor"),
        (lose_a_head, "incomplete"),
    ],
)
def test_a_broken_folder_is_refused_in_one_line(folder, spoil, says):
    spoil(folder)
    with pytest.raises(ModelError, match=says) as refusal:
        loaded(folder)
    assert refusal.value.exit_code == 4
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "word", "a/b/c", "", "\x00"])
def test_a_missing_checkpoint_is_refused(name):
    with pytest.raises(ModelError, match="not a checkpoint|there is no folder"):
        Checkpoint.find(LoadRequest(name))


@pytest.mark.parametrize("name", ["C:/models", "D:/a/b", r"C:\models\x", r"models\x"])
def test_a_path_of_windows_is_no_id_of_the_hub(name):
    with pytest.raises(ModelError, match="there is no folder"):
        folder_or_repo(name)
    with pytest.raises(ModelError, match="there is no file"):
        folder_or_repo(f"{name}.gguf")


def test_an_empty_folder_and_an_uncached_id_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        Checkpoint.find(LoadRequest(str(tmp_path)))
    with pytest.raises(ModelError, match="not in the cache"):
        Checkpoint.find(LoadRequest("nobody/nothing", offline=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_weights_in_fp8_are_unpacked_to_the_precision_asked_for(folder, precision):
    def halved(name, weight):
        if "proj" not in name:
            return {name: weight.bfloat16()}
        blocks = [size // 16 for size in weight.shape]
        scale = float(weight.abs().max()) / 400
        scales = torch.full(blocks, scale)
        return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}

    tensors = load_file(folder / "model.safetensors")
    packed = {k: v for name, w in tensors.items() for k, v in halved(name, w).items()}
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [16, 16],
            "modules_to_not_convert": ["lm_head"],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = loaded(folder, precision=precision)
    plain = answer(model, drafter="none")[-1].token_ids
    assert answer(model, drafter="medusa")[-1].token_ids == plain


def test_what_of_a_generation_config_is_not_applied_is_said(folder):
    config = {"eos_token_id": 255, "repetition_penalty": 1.3, "min_new_tokens": 5, "top_p": 0.8}
    file = folder / "generation_config.json"
    file.write_text(json.dumps(config | {"suppress_tokens": [], "no_repeat_ngram_size": 0}))
    assert "not applied, of generation_config.json: min_new_tokens" in loaded(folder).info.notes


def test_what_a_generation_config_says_of_sampling_is_the_models_default(folder):
    config = {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 255, "min_p": 7, **config}))
    info = loaded(folder).info
    assert info.sampling == config
    said = "temperature 0.6, top-p 0.8, top-k 20, repetition-penalty 1.05"
    assert f"model's defaults: {said}" in info.notes
    wrong = "not applied, of generation_config.json: min_p is 7: give a number from 0 to 1"
    assert wrong in info.notes


def test_a_model_without_a_generation_config_names_no_defaults(folder):
    assert loaded(folder).info.sampling == {}


def test_a_repo_folder_of_the_hubs_cache_means_its_snapshot_of_main(folder, tmp_path):
    repo = tmp_path / "models--me--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc123\n")
    (repo / "snapshots").mkdir()
    folder.rename(repo / "snapshots" / "abc123")
    assert Checkpoint.find(LoadRequest(str(repo))).backbone == repo / "snapshots" / "abc123"


def test_devices_precisions_and_contexts_out_of_range(folder):
    for options, kind in (
        ({"device": "tpu"}, UsageError),
        ({"device": "cpu:x"}, UsageError),
        ({"precision": "fp8"}, UsageError),
        ({"max_context": 9999}, UsageError),
        ({"max_context": 1}, UsageError),
    ):
        with pytest.raises(kind):
            loaded(folder, **options)
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no CUDA GPU"):
            loaded(folder, device="cuda")


def test_max_context_bounds_the_text(folder):
    model = loaded(folder, max_context=40)
    events = answer(model, "x" * 30, max_new_tokens=100)
    assert events[-1].reason == "context" and model.info.context == 40
    with pytest.raises(MedusaChatError, match="40 tokens and the context holds 40"):
        answer(model, "x" * 40)


def test_what_is_left_open_is_resolved_and_recorded(folder):
    model = loaded(folder)
    settings = answer(model, drafter=None, seed=None)[0].settings
    assert settings["drafter"] == "auto" and settings["nodes"] == 4
    assert settings["tree"] == "auto" and isinstance(settings["seed"], int)
    assert answer(model, drafter="none")[0].settings["nodes"] == 1
    with pytest.raises(UsageError, match="depth 4 and the checkpoint 3 heads"):
        answer(model, tree="mc_sim_7b_63")
    assert resolve(model, GenerationSettings(nodes=5))[1].tree.depth <= 3
    with pytest.raises(UsageError, match="nodes is 200"):
        resolve(model, GenerationSettings(nodes=200))


def test_a_conversation_keeps_its_ids_and_cache(folder):
    model = loaded(folder)
    conversation = [{"role": "user", "content": "hi é"}]
    first = answer(model, conversation, temperature=0.8)
    conversation += [
        {"role": "assistant", "content": first[-1].text},
        {"role": "user", "content": "more"},
    ]
    ids = encode(model, conversation).ids
    before = [*first[0].prompt_token_ids, *first[-1].token_ids]
    assert ids[: len(before)] == before
    second = answer(model, conversation, temperature=0.8)
    assert second[0].reused_tokens >= len(before) - 1
    at_once = engine_answer(loaded(folder), ids, temperature=0.8)
    assert at_once[0].reused_tokens == 0
    assert at_once[-1].token_ids == second[-1].token_ids


@pytest.mark.parametrize("content", ["{{ m['content'] }}", "{{ m['content'] | trim }}"])
def test_a_continued_answer_goes_on_right_after_its_last_character(tmp_path, content):
    template = TEMPLATE.replace("m['content']", content[3:-3])
    model = loaded(write_checkpoint(tmp_path / "m", template=template))
    conversation = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "so it ends \n"},
    ]
    assert encode(model, conversation).text == "u:hi\na:so it ends \n"


def engine_answer(model, ids, **settings):
    """What the engine itself gives for exact token ids."""
    asked = GenerationSettings(**{"max_new_tokens": 20, "seed": 3} | settings)
    chosen, drafter = resolve(model, asked)
    model.engine.forget()
    return list(model.engine.generate(ids, drafter, chosen))


def test_a_stop_string_leaves_nothing_in_the_next_prompt(folder):
    model = loaded(folder)
    conversation = [{"role": "user", "content": "hi"}]
    whole = answer(model, conversation)[-1].text
    cut = answer(model, conversation, stop=(whole[2],))[-1]
    assert cut.reason == "stop" and cut.text == whole[: whole.index(whole[2])]
    fresh = loaded(folder)
    for messages in (
        conversation,
        [*conversation, {"role": "assistant", "content": cut.text}, *conversation],
    ):
        assert encode(model, messages) == encode(fresh, messages)


def test_without_a_template_a_conversation_says_what_to_use(tmp_path):
    model = loaded(write_checkpoint(tmp_path / "m", template=None))
    with pytest.raises(UsageError, match="--raw"):
        answer(model, [{"role": "user", "content": "hi"}])
    assert answer(model, "hi")[-1].token_ids


def test_a_template_that_refuses_says_so(tmp_path):
    template = "{{ raise_exception('roles must alternate') }}"
    model = loaded(write_checkpoint(tmp_path / "m", template=template))
    with pytest.raises(UsageError, match="roles must alternate"):
        answer(model, [{"role": "user", "content": "hi"}])


def test_replaced_submodules_give_what_the_stock_ones_give(folder):
    from transformers import AutoModelForCausalLM

    from medusa_chat.decoding.backends.replacements import replace_submodules

    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    mine = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = stock(ids).logits
        assert replace_submodules(mine)
        kinds = {type(m) for m in mine.modules()}
        assert {torch.nn.RMSNorm, FusedLayer} <= kinds
        assert torch.allclose(mine(ids).logits, expected, atol=2e-4)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.parametrize("rows", [1, 5, 16, 64])
def test_a_packed_linear_gives_what_the_linear_gives(rows):
    linear = torch.nn.Linear(48, 2048, bias=rows % 2 == 0)
    x = torch.randn(rows, 48)
    with torch.no_grad():
        assert torch.allclose(PackedLinear(linear)(x), linear(x), atol=1e-5)


def test_a_load_lists_the_folder_twice_at_most_and_reads_each_header_and_config_once(
    folder, monkeypatch
):
    read, listed = Counter(), Counter()
    before, scan = LocalFolder.read, LocalFolder._listed

    def counted(source, file, start, length):
        read[file, start] += 1
        return before(source, file, start, length)

    def scanned(source):
        listed[source.folder] += 1
        return scan(source)

    monkeypatch.setattr(LocalFolder, "read", counted)
    monkeypatch.setattr(LocalFolder, "_listed", scanned)
    loaded(folder)
    assert listed[folder] <= 2  # once more where transformers is given the weights' name
    assert read["config.json", 0] == 1
    assert {count for (_, start), count in read.items() if start} == {1}, "headers"
