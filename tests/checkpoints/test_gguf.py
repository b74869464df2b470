"""A GGUF file is read straight into a model, to the bit, and writes nothing but its settings."""

import json
import os
import shutil
from importlib import metadata
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from support import gguf_models
from support.checkpoints import write_checkpoint, write_heads
from support.gguf_families import MODELS, NAMES, YARN
from support.gguf_models import BOS, END, old_copy, text, tiny_model, write_gguf
from support.loading import answer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaTokenizer,
    GgufConfig,
)

from medusa_chat import paths
from medusa_chat.checkpoints import device_plan, kept_copies
from medusa_chat.checkpoints.gguf_settings import with_settings
from medusa_chat.checkpoints.gguf_weights import GgufWeights
from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.weights import config_of, read_config, read_model
from medusa_chat.cli.main import main
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import ModelError
from medusa_chat.messages import LoadRequest

CPU = torch.device("cpu")
WIDE = {"hidden_size": 256, "intermediate_size": 256}
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
PACKED = ("Q2_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
GEMMA4 = {"tie_word_embeddings": True, "final_logit_softcapping": 30.0}
SMALL_GEMMA4 = {  # as E2B
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": gguf_models.ROWS,
}
LARGE_GEMMA4 = {  # as the 26B: a mixture, no sharing, values made of the keys
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 262_144,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "use_double_wide_mlp": False,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
FAMILIES = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": GEMMA | {"sliding_window": 16},
    "gemma3": GEMMA | {"sliding_window": 16, "layer_types": None, "num_hidden_layers": 7},
    "gemma4": GEMMA4 | SMALL_GEMMA4,
    "gemma4 large": GEMMA4 | LARGE_GEMMA4,
    "phi3": {},
    **{family: {} for family in MODELS if family != "gemma2"},
    "exaone4 windowed": {"sliding_window": 16, "num_hidden_layers": 5, "layer_types": None},
}

# of a config: what a file does not tell, or tells otherwise
UNTOLD = (
    *("_name_or_path", "architectures", "dtype", "initializer_range"),
    *("eos_token_id", "bos_token_id", "pad_token_id"),
)


def model_of(family, **changes):
    return tiny_model(family.split()[0], **FAMILIES[family] | changes)


def found_in(path):
    """The file with the folder of its settings."""
    return with_settings(Checkpoint.find(LoadRequest(str(path))))


def read(path, precision="fp32"):
    """The model in a file, unpacked."""
    found = found_in(path)
    return read_model(found, config_of(found), precision, CPU)


def loads(path, **options):
    """The names of the phases, the notes of them, and the model."""
    phases = list(load(LoadRequest(str(path), **({"precision": "fp32"} | options))))
    names = list(dict.fromkeys(phase.name for phase, _ in phases))
    return names, [phase.note for phase, _ in phases if phase.note], phases[-1][1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_comes_back_as_it_was_before_it_became_a_gguf_file(family, tmp_path):
    model = model_of(family)
    path = write_gguf(tmp_path / "a.gguf", model)
    found, again = found_in(path), read(path)
    states = model.state_dict(), again.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        if family.startswith("gemma") and name.endswith("norm.weight"):
            assert torch.allclose(tensor, states[1][name], atol=1e-6), name  # by way of 1 + it
        else:
            assert torch.equal(tensor, states[1][name]), name
    ids = torch.arange(40)[None]
    assert torch.allclose(model(ids).logits, again(ids).logits, atol=1e-4)
    config = read_config(found.settings).to_dict()
    assert config["architectures"] == [type(model).__name__]
    for key, value in model.config.to_dict().items():
        if key not in UNTOLD:
            assert rounded(config[key]) == rounded(value), key


def rounded(value):
    """As fp32 has it, in which a file holds its numbers."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return np.float32(value) if isinstance(value, float) else value


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")),
        ("glm4_moe", "glm4moe"),
    ],
)
def test_a_file_of_a_vision_language_model_is_its_text_part(family, name, tmp_path):
    model, sections = model_of(family), {f"{name}__rope__dimension_sections": [2, 1, 1, 0]}
    path = write_gguf(tmp_path / "a.gguf", model, family=name, **sections)
    config, states = read_config(found_in(path).settings), model.state_dict()
    assert config.model_type == family
    again = read(path).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in states.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_file_is_the_model_quantised_answers_and_takes_what_was_estimated(
    family, tmp_path, capsys
):
    model = model_of(family)
    path = write_gguf(tmp_path / "a.gguf", model, "Q8_0")
    write_heads(tmp_path, MedusaHeads(3, 32))
    _, _, loaded = loads(tmp_path)
    assert loaded.info.estimated_bytes == pytest.approx(loaded.info.memory_bytes, rel=0.1)
    plain, *others = (
        answer(loaded, "hello the hedgehog " * 3, drafter=drafter)[-1].token_ids
        for drafter in ("none", "medusa", "prompt-lookup")
    )
    assert others == [plain, plain]
    assert main(["inspect", "--backbone", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["family"] == model.config.model_type
    assert report["parameters"] == pytest.approx(model.num_parameters(), rel=0.03)
    found = read(path).state_dict()
    for name, tensor in model.state_dict().items():
        is_rows = tensor.squeeze().dim() > 1 and not name.endswith(("_bias", "kv_b_proj.weight"))
        if is_rows and name in found:
            is_turned = family == "gpt_oss" and tensor.dim() == 3
            rows = tensor.transpose(1, 2).contiguous() if is_turned else tensor
            stored = gguf.quantize(rows.numpy(), gguf.GGMLQuantizationType.Q8_0)
            plain = torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType.Q8_0))
            wanted = plain.transpose(1, 2) if is_turned else plain
            assert torch.equal(found[name], wanted), name


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "MXFP4"])
@pytest.mark.parametrize(("family", "widths"), [("qwen3_moe", (768,)), ("qwen2_moe", (1408, 5632))])
def test_experts_are_to_the_bit_those_that_transformers_reads(family, widths, kind, tmp_path):
    names = ("moe_intermediate_size", "shared_expert_intermediate_size")
    told = dict(zip(names, widths, strict=False))  # transformers 5.23 takes them from its defaults
    path = write_gguf(tmp_path / "a.gguf", model_of(family, **told), kind)
    theirs = read_by_transformers(path, torch.float32)
    ours = read(path).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def read_by_transformers(path, dtype):
    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),
    ).state_dict()


@pytest.mark.parametrize("kind", TYPES + PACKED)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_weights_are_to_the_bit_those_that_transformers_reads(kind, precision, tmp_path):
    path = write_gguf(tmp_path / "a.gguf", tiny_model(**WIDE), kind)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    theirs = read_by_transformers(path, dtype)
    ours = read(path, precision).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_config_tokenizer_and_template_are_those_that_transformers_reads(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", tiny_model(), tokenizer__ggml__eot_token_id=BOS)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<pad>", "chat_template": "x"}')
    found = found_in(path)
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file="a.gguf").to_dict()
    ours = read_config(found.settings).to_dict()
    own = ("_name_or_path", "_model_name_or_path", "architectures", "dtype", "unk_token_id")
    assert {k: v for k, v in ours.items() if k not in own} == {
        k: v for k, v in theirs.items() if k not in own
    }
    (tmp_path / "tokenizer_config.json").unlink()
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    ours = AutoTokenizer.from_pretrained(found.settings)
    for said in ("hello the hedgehog", "<|im_start|>user\nhi<|im_end|>", "  été 12 \U0001f600"):
        assert ours(said).input_ids == theirs(said).input_ids
    assert ours.chat_template == theirs.chat_template and ours.chat_template
    added = {"<|endoftext|>": gguf_models.ROWS}  # by theirs, beyond the embeddings
    assert ours.eos_token_id == END and ours.get_vocab() | added == theirs.get_vocab()
    ends = json.loads((found.settings / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [END, BOS]


def test_keys_that_no_layer_of_gemma4_reads_are_left_out(tmp_path, monkeypatch):
    """Published files have them for the layers that read those of others."""
    model, tensors = model_of("gemma4"), gguf_models.tensors_of
    names = [f"blk.{layer}.{key}.weight" for layer in (2, 3) for key in ("attn_k", "attn_v")]
    more = dict.fromkeys(names, np.ones((16, 32), np.float32))
    more |= {"blk.3.attn_k_norm.weight": np.ones(8, np.float32)}
    monkeypatch.setattr(gguf_models, "tensors_of", lambda *given: {**tensors(*given), **more})
    again = read(write_gguf(tmp_path / "a.gguf", model)).state_dict()
    assert again.keys() == model.state_dict().keys()


def test_layers_that_draft_tokens_are_left_out(tmp_path, monkeypatch):
    model, tensors = model_of("glm4_moe"), gguf_models.tensors_of
    more = {
        "blk.3.attn_q.weight": np.ones((64, 32), np.float32),
        "blk.3.nextn.eh_proj.weight": np.ones((32, 64), np.float32),
    }
    monkeypatch.setattr(gguf_models, "tensors_of", lambda *given: {**tensors(*given), **more})
    told = {"glm4moe__block_count": 4, "glm4moe__nextn_predict_layers": 1}
    again = read(write_gguf(tmp_path / "a.gguf", model, **told)).state_dict()
    assert again.keys() == model.state_dict().keys()
    told["glm4moe__nextn_predict_layers"] = 4
    with pytest.raises(ModelError, match=r"no valid glm4moe\.nextn_predict_layers"):
        read(write_gguf(tmp_path / "b.gguf", model, **told))


def test_an_older_file_of_deepseek_has_keys_and_values_whole(tmp_path, monkeypatch):
    model, tensors = model_of("deepseek_v3"), gguf_models.tensors_of
    name = "model.layers.{}.self_attn.kv_b_proj.weight"
    whole = {f"blk.{n}.attn_kv_b.weight": model.state_dict()[name.format(n)] for n in range(3)}

    def older(*given):
        kept = {
            n: t for n, t in tensors(*given).items() if not n.endswith("_b.weight") or "q_b" in n
        }
        return kept | {n: tensor.numpy() for n, tensor in whole.items()}

    monkeypatch.setattr(gguf_models, "tensors_of", older)
    for key in ("add_key_length_mla", "add_value_length_mla"):
        monkeypatch.setattr(gguf.GGUFWriter, key, lambda *_: None)
    told = {"key_length": 40, "value_length": 16, "head_count_kv": 4}
    told = {f"deepseek2__attention__{key}": value for key, value in told.items()}
    again = read(write_gguf(tmp_path / "a.gguf", model, **told)).state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("shape", [(4, 16, 16), (2, 32, 32), (64, 32)])
def test_parts_of_keys_and_values_that_do_not_fit_are_refused(shape, tmp_path, monkeypatch):
    tensors = gguf_models.tensors_of
    wrong = {"blk.1.attn_v_b.weight": np.ones(shape, np.float32)}
    monkeypatch.setattr(gguf_models, "tensors_of", lambda *given: {**tensors(*given), **wrong})
    path = write_gguf(tmp_path / "a.gguf", model_of("deepseek_v2"))
    with pytest.raises(ModelError, match=r"kv_b_proj.weight is \(\), \(192, 32\) was expected"):
        read(path)


def test_another_way_to_choose_experts_is_refused(tmp_path):
    path = write_gguf(
        tmp_path / "a.gguf", model_of("minimax_m2"), **{"minimax-m2__expert_gating_func": 1}
    )
    with pytest.raises(ModelError, match="chooses experts by the function 1"):
        read(path)


def test_a_gemma4_vocabulary_is_read_as_its_own_tokenizer_class_reads_it(tmp_path):
    """But for <bos>: without it the base models answer badly."""
    path = write_gguf(tmp_path / "a.gguf", model_of("gemma4"))
    vocabulary = list(map(str, GGUFReader(path).get_field("tokenizer.ggml.tokens").contents()))
    ids = {token: index for index, token in enumerate(vocabulary)}
    theirs = GemmaTokenizer(vocab=ids, merges=[("h", "e"), ("\u2581", "he")])
    theirs.add_tokens(["<|turn>", "<turn|>"])
    ours = AutoTokenizer.from_pretrained(found_in(path).settings)
    for said in ("he  he", " he\n\nthe", "<|turn>he<turn|>\n", "\u00e9t\u00e9"):
        begin, *found = ours(said).input_ids
        assert begin == 2 and found == theirs(said).input_ids, said
        assert ours.decode(found) == said
    assert ours.convert_ids_to_tokens(ours(" he\n").input_ids)[1:] == ["\u2581he", "<0x0A>"]
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (2, 1, 0)


def test_tokens_that_are_to_be_suppressed_are_named_by_a_note(tmp_path):
    told = {"tokenizer__ggml__suppress_tokens": [7, 8]}
    _, _, loaded = loads(write_gguf(tmp_path / "a.gguf", model_of("gemma4"), **told))
    assert "not applied, of generation_config.json: suppress_tokens" in loaded.info.notes


def test_what_a_file_says_of_sampling_is_the_models_default(tmp_path):
    told = {"temp": 0.8, "top_k": 40, "penalty_repeat": 1.1, "mirostat": 0}
    keys = {f"general__sampling__{name}": value for name, value in told.items()}
    _, _, loaded = loads(write_gguf(tmp_path / "a.gguf", model_of("llama"), **keys))
    expected = {"temperature": 0.8, "top_k": 40, "repetition_penalty": 1.1}
    assert loaded.info.sampling == expected


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"gemma4__attention__sliding_window_pattern": [False, True] * 2}, "two kinds of layers"),
        ({"gemma4__attention__head_count_kv": [2, 2]}, "no valid .*head_count_kv"),
        ({"gemma4__attention__shared_kv_layers": 3}, "config in .* cannot be read"),
        ({"gemma4__attention__shared_kv_layers": 0}, "lacks model.layers.2.self_attn.k_norm"),
        ({"gemma4__attention__key_length": 32}, r"q_proj.weight is \(64, 32\)"),
    ],
)
def test_a_gemma4_file_whose_numbers_do_not_fit_is_refused(told, expected, tmp_path):
    path = write_gguf(tmp_path / "a.gguf", model_of("gemma4"), **told)
    with pytest.raises(ModelError, match=expected):
        read(path)


def test_mistral3_without_a_scale_by_position_is_mistral(tmp_path, monkeypatch):
    monkeypatch.setitem(NAMES, "mistral", "mistral3")
    model = tiny_model("mistral", sliding_window=None, rope_parameters=YARN)
    path = write_gguf(tmp_path / "a.gguf", model)
    again = read(path)
    assert again.config.model_type == "mistral" and again.config.sliding_window is None
    ids = torch.arange(40)[None]
    assert torch.allclose(model(ids).logits, again(ids).logits, atol=1e-4)


def test_a_count_for_each_layer_is_read_where_all_are_the_same(tmp_path):
    path = write_gguf(
        tmp_path / "a.gguf", model_of("granite"), granite__attention__head_count_kv=[2, 2]
    )
    assert read_config(found_in(path).settings).num_key_value_heads == 2


def test_gates_and_ups_of_two_shapes_are_refused(tmp_path, monkeypatch):
    tensors = gguf_models.tensors_of
    wrong = {"blk.0.ffn_up_exps.weight": np.ones((4, 32, 32), np.float32)}
    monkeypatch.setattr(gguf_models, "tensors_of", lambda *given: {**tensors(*given), **wrong})
    path = write_gguf(tmp_path / "a.gguf", model_of("mixtral"))
    with pytest.raises(ModelError, match=r"gate_up_proj is \(\), \(4, 128, 32\) was expected"):
        read(path)


def test_no_space_is_put_before_a_text_where_the_file_says_so(tmp_path):
    told = {"tokenizer__ggml__add_space_prefix": False}
    path = write_gguf(tmp_path / "a.gguf", tiny_model(), sentencepiece=True, **told)
    tokenizer = AutoTokenizer.from_pretrained(found_in(path).settings)
    for said, first in (("hello he", "he"), (" hello", "\u2581he"), ("l\nhe", "l")):
        ids = tokenizer(said).input_ids
        assert tokenizer.convert_ids_to_tokens(ids[1]) == first
        assert tokenizer.decode(ids, skip_special_tokens=True) == said


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope_factors(config):
    """What llama.cpp's converter keeps of Llama 3.1's scaling."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    width = config.hidden_size // config.num_attention_heads
    plain = 1 / LLAMA3["rope_theta"] ** (torch.arange(0, width, 2) / width)
    return (plain / scaled).numpy().astype(np.float32)


def test_rotary_scaling_that_lies_in_tensors_comes_back(tmp_path, monkeypatch):
    wide = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = tiny_model(**wide, max_position_embeddings=131_072, rope_parameters=LLAMA3)
    factors = rope_factors(model.config)
    assert 1 < factors[-1] <= 8.001 and factors[0] == 1 and len(set(factors.tolist())) > 2
    tensors = gguf_models.tensors_of
    with monkeypatch.context() as patch:
        patch.setattr(
            gguf_models,
            "tensors_of",
            lambda *given: {**tensors(*given), "rope_freqs.weight": factors},
        )
        write_gguf(tmp_path / "a.gguf", model)
    found = found_in(tmp_path / "a.gguf")
    assert read_config(found.settings).rope_parameters == LLAMA3
    for odd in (factors**2, np.full_like(factors, 1e-4)):
        with monkeypatch.context() as patch:
            patch.setattr(
                gguf_models,
                "tensors_of",
                lambda *given, odd=odd: {**tensors(*given), "rope_freqs.weight": odd},
            )
            write_gguf(tmp_path / "b.gguf", model)
        with pytest.raises(ModelError, match="in a way that is not known"):
            read(tmp_path / "b.gguf")


def test_the_long_and_the_short_factors_of_phi3_come_back(tmp_path, monkeypatch):
    short, long = np.array([1, 1.1, 1.2, 1.3], np.float32), np.array([1, 2, 3, 4], np.float32)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "original_max_position_embeddings": 64,
    }
    model = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    tensors = gguf_models.tensors_of
    more = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    monkeypatch.setattr(gguf_models, "tensors_of", lambda *given: {**tensors(*given), **more})
    told = {
        "phi3__rope__scaling__type": "longrope",
        "phi3__rope__scaling__original_context_length": 64,
    }
    again = read(write_gguf(tmp_path / "a.gguf", model, **told))
    for length in (40, 100):  # within and beyond the original context
        ids = torch.arange(length)[None]
        assert torch.allclose(model(ids).logits, again(ids).logits, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"blk.0.attn_q.bias": np.ones(32, np.float32)}, "holds the tensor .*q_proj.bias, which"),
        ({"blk.1.attn_q_norm.weight": None}, "lacks model.layers.1.self_attn.q_norm.weight"),
        ({"blk.0.attn_q_norm.weight": np.ones(4, np.float32)}, r"is \(4,\), \(16,\) was expected"),
    ],
)
def test_tensors_that_are_not_those_of_the_model_are_refused(
    changes, expected, tmp_path, monkeypatch
):
    tensors = gguf_models.tensors_of

    def changed(*given):
        found = {**tensors(*given), **changes}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    monkeypatch.setattr(gguf_models, "tensors_of", changed)
    path = write_gguf(tmp_path / "a.gguf", model_of("qwen3"))
    with pytest.raises(ModelError, match=expected):
        read(path)
    assert main(["inspect", str(path)]) == 4


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_no_numbers_are_refused_by_the_tensors_name(bad, tmp_path):
    model = model_of("llama")
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = float(bad)
    path = write_gguf(tmp_path / "a.gguf", model)
    with pytest.raises(ModelError, match=r"a\.gguf: tensor blk\.1\.ffn_down\.weight holds values"):
        read(path)


def test_a_load_writes_nothing_but_its_settings_and_once(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", tiny_model(), "Q8_0")
    _, _, model = loads(path, precision="auto")
    first = answer(model, drafter="none")[-1].token_ids
    (folder,) = (paths.cache_dir() / "settings").iterdir()
    names = {file.name for file in folder.iterdir()}
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "about.json"}
    assert not any(name.endswith((".safetensors", ".bin")) for name in names)
    written = {file.parent.name for file in paths.cache_dir().rglob("*") if file.is_file()}
    written -= {"checks", "native", paths.cache_dir().name}
    assert written == {folder.name}
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    assert answer(loads(path, precision="auto")[2], drafter="none")[-1].token_ids == first
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before
    write_gguf(path, tiny_model(seed=1), "Q8_0")
    assert answer(loads(path, precision="auto")[2], drafter="none")[-1].token_ids != first
    (other,) = (paths.cache_dir() / "settings").iterdir()  # those of the file as it was are gone
    assert other != folder and not kept_copies.kept()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    path = write_gguf(tmp_path / "a.gguf", tiny_model())
    full = SimpleNamespace(free=10_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    assert main(["generate", "--backbone", str(path), "--prompt", "a", "--device", "cpu"]) == 4
    said = capsys.readouterr().err.strip()
    assert "its disk is full" in said and "\n" not in said


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_a_file_is_never_rounded_again(kind, precision, tmp_path, capsys):
    path = write_gguf(tmp_path / "a.gguf", tiny_model(), kind)
    asked = ["--prompt", "a", "--device", "cpu", "--precision", precision]
    assert main(["generate", "--backbone", str(path), *asked]) == 2
    said = capsys.readouterr().err.strip()
    assert f"{kind}, which is never rounded again" in said and "\n" not in said


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_unpacking_takes_is_said_first(precision, tmp_path):
    path = write_gguf(tmp_path / "a.gguf", tiny_model(), "Q8_0")
    _, notes, model = loads(path, precision=precision)
    assert notes[0].startswith("a.gguf (Q8_0, ")
    assert f"is unpacked to {precision} in memory, which takes" in notes[0]
    assert model.info.precision == precision and notes[0] in model.info.notes
    assert loads(write_gguf(tmp_path / "b.gguf", tiny_model(), "F32"))[1] == []


def test_without_a_compiler_a_small_file_is_unpacked_and_a_large_one_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MEDUSA_CHAT_NATIVE", "0")
    path = write_gguf(tmp_path / "a.gguf", tiny_model(), "Q8_0")
    _, notes, model = loads(path, precision="auto")
    assert "is unpacked to" in notes[0] and model.info.precision in ("bf16", "fp32")
    monkeypatch.setattr(device_plan, "UNBUILT", 1000)
    with pytest.raises(ModelError, match="there is no C compiler here to build it"):
        loads(path, precision="auto")


def test_a_file_that_is_cut_while_it_is_read_is_one_line(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", tiny_model(), "Q8_0")
    weights = GgufWeights.of(found_in(path))
    path.write_bytes(path.read_bytes()[:-4000])
    last = list(weights.places)[-1]
    for ask in (lambda: weights.floats(last, torch.float32), lambda: list(weights.blocks(last))):
        with pytest.raises(ModelError, match=r"a\.gguf cannot be read \(it was cut while"):
            ask()


def test_heads_sit_on_it_as_on_the_folder_it_was_made_of(tmp_path):
    model = tiny_model(hidden_size=32)
    path = write_gguf(tmp_path / "models" / "a.gguf", model)
    write_heads(tmp_path / "models", MedusaHeads(3, 32))
    _, _, loaded = loads(path.parent)  # beside it
    assert loaded.info.heads == 3
    plain = answer(loaded, drafter="none")[-1].token_ids
    assert answer(loaded, drafter="medusa")[-1].token_ids == plain
    heads = tmp_path / "heads"
    write_heads(heads, MedusaHeads(3, 32)) if heads.mkdir() is None else None
    _, _, other = loads(heads, backbone=str(path))
    assert other.info.heads == 3
    assert answer(other, drafter="medusa")[-1].token_ids == plain
    (heads / "config.json").write_text('{"base_model_name_or_path": "../models/a.gguf"}')
    assert loads(heads)[2].info.heads == 3


def test_a_backbone_that_is_named_alone_is_loaded_alone(tmp_path, capsys):
    path = write_gguf(tmp_path / "a.gguf", tiny_model())
    folder = write_checkpoint(tmp_path / "folder", heads=0)
    asked = ["--prompt", "hello", "--max-new-tokens", "4", "--json", "--device", "cpu"]
    for place in (path, folder):
        assert main(["generate", "--backbone", str(place), *asked]) == 0
        first = json.loads(capsys.readouterr().out.splitlines()[0])
        assert first["model"] == str(place) and first["settings"]["drafter"] == "prompt-lookup"


def test_the_largest_quantised_file_of_a_folder_is_read_and_told(tmp_path):
    model = tiny_model()
    write_gguf(tmp_path / "m-Q4_0.gguf", model, "Q4_0")
    write_gguf(tmp_path / "m-Q8_0.gguf", model, "Q8_0")
    write_gguf(tmp_path / "m-F32.gguf", model)
    found = Checkpoint.find(LoadRequest(str(tmp_path)))
    assert found.source.name == "m-Q8_0.gguf"
    assert any(
        "reading m-Q8_0.gguf, the largest quantised of 3 GGUF files" in note for note in found.notes
    )
    named = Checkpoint.find(LoadRequest(str(tmp_path / "m-F32.gguf")))
    assert named.source.name == "m-F32.gguf" and not named.notes


def test_the_file_that_is_read_of_several_folders_is_told(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_gguf(tmp_path / name / f"{name}.gguf", tiny_model())
    found = Checkpoint.find(LoadRequest(str(tmp_path)))
    assert found.source.name == "one.gguf"
    assert any(
        "reading one/one.gguf, the largest quantised of 2 GGUF files" in note
        for note in found.notes
    )


def test_inspect_tells_what_it_is_and_the_memory_it_takes(tmp_path, capsys):
    model = tiny_model()
    path = write_gguf(tmp_path / "a.gguf", model, "Q8_0")
    assert main(["inspect", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["family"], report["stored"], report["is_here"]) == ("llama", "Q8_0", True)
    assert report["parameters"] == model.num_parameters() and "fp16" in report["memory"]
    assert main(["inspect", "--backbone", str(path)]) == 0
    out = capsys.readouterr().out
    assert "GGUF Q8_0" in out and "\n  Q8_0      " in out and "\n  nf4 " not in out
    assert not (paths.cache_dir() / "settings").exists()
    path.write_bytes(path.read_bytes()[:-40])
    assert main(["inspect", str(path)]) == 4
    assert "ends at byte" in capsys.readouterr().err
    assert main(["generate", "--backbone", str(path), "--prompt", "a"]) == 4


def test_old_conversions_are_listed_with_their_size_and_removed(tmp_path, capsys):
    path = write_gguf(tmp_path / "a.gguf", tiny_model())
    old_copy(path)
    found_in(path)
    assert main(["models", "list"]) == 0
    assert f"{path}  (converted to bf16, of an earlier version: no longer read)" in (
        capsys.readouterr().out
    )
    assert main(["models", "list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["converted"]
    assert row["source"] == str(path) and row["bytes"] > 2000
    os.chdir(tmp_path)
    assert main(["models", "rm", "a.gguf"]) == 0
    assert kept_copies.kept() == () and path.is_file()
    assert not list((paths.cache_dir() / "settings").glob("[!.]*"))
    assert main(["models", "rm", "a.gguf"]) == 4


def test_what_is_no_place_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("no.gguf", "sub/no.gguf", "./no.gguf"):
        assert main(["generate", "--backbone", name, "--prompt", "a"]) == 4
        assert f"there is no file {name}" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text("x")
    assert main(["generate", "--backbone", "notes.txt", "--prompt", "a"]) == 4
    assert "or a GGUF file" in capsys.readouterr().err


def test_a_tokenizer_that_is_not_known_is_one_line(tmp_path, capsys):
    path = write_gguf(tmp_path / "a.gguf", tiny_model())
    path.write_bytes(path.read_bytes().replace(text("gpt2"), text("gptX")))
    assert main(["generate", "--backbone", str(path), "--prompt", "a"]) == 4
    said = capsys.readouterr().err.strip()
    assert "its tokenizer is of the kind 'gptX'" in said


def test_without_the_package_gguf_a_file_is_one_line(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "a.gguf", tiny_model())

    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ModelError, match="pip install gguf"):
        read(path)


def test_without_a_template_it_loads_and_says_so(tmp_path):
    _, _, model = loads(write_gguf(tmp_path / "a.gguf", tiny_model(), template=None))
    assert model.tokenizer.chat_template is None
