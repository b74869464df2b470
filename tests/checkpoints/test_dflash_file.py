"""DFlash drafters: every layout is one drafter; relatives and misfits are refused in a line."""

import gguf
import numpy as np
import pytest
import torch
from support import dflash_files
from support.families import VOCABULARY
from support.followers import CPU, HIDDEN, write

from medusa_chat.checkpoints.dflash_weights import read_dflash
from medusa_chat.checkpoints.inspection import inspect
from medusa_chat.checkpoints.layouts.drafter_file import Sizes
from medusa_chat.checkpoints.layouts.drafters import drafter_in
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.decoding.drafters.own_layers import Lent
from medusa_chat.errors import ModelError
from medusa_chat.messages import LoadRequest

TAPS = (2, 4)
W1, W2 = (f"markov_head.markov_w{place}.weight" for place in (1, 2))


def found_in(folder):
    return drafter_in(LocalFolder(folder))


def model_of(folder):
    torch.manual_seed(0)
    lent = Lent(torch.nn.Embedding(VOCABULARY, HIDDEN), torch.nn.Linear(HIDDEN, VOCABULARY))
    return read_dflash(found_in(folder), lent, Sizes(HIDDEN, 6, VOCABULARY), CPU, torch.float32)


def write_gguf(folder, tensors, heads=dflash_files.HEADS, pattern=None):
    """As llama.cpp's converter writes it: rows of heads as they are, places of hidden states."""
    names = {
        "fc": "fc",
        "hidden_norm": "enc.output_norm",
        "norm": "output_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
        "self_attn.o_proj": "attn_output",
        **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
        **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    }
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "drafter.gguf", "dflash")
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(dflash_files.INNER)
    if heads is not None:
        writer.add_head_count(heads)
    if pattern is not None:
        writer.add_sliding_window(16)
        writer.add_sliding_window_pattern(pattern)
    writer.add_head_count_kv(dflash_files.KEYS)
    writer.add_key_length(dflash_files.HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_context_length(256)
    writer.add_rope_freq_base(10_000.0)
    writer.add_array("dflash.target_layers", list(TAPS))
    writer.add_uint32("dflash.block_size", dflash_files.BLOCK)
    writer.add_uint32("tokenizer.ggml.mask_token_id", dflash_files.MASK)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    for name, tensor in tensors.items():
        outer = name.removesuffix(".weight")
        if outer.startswith("layers."):
            _, number, inner = outer.split(".", 2)
            named = f"blk.{number}.{names[inner]}"
        else:
            named = names[outer]
        writer.add_tensor(f"{named}.weight", tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def test_every_layout_is_one_drafter(tmp_path):
    tensors, settings = dflash_files.tensors(HIDDEN), dflash_files.config(HIDDEN, TAPS)
    named = settings.pop("dflash_config")
    folders = [
        write(tmp_path / "z-lab", tensors, settings | {"dflash_config": named}),
        write(
            tmp_path / "deepspec", {f"model.{n}": t for n, t in tensors.items()}, settings | named
        ),
        write(
            tmp_path / "speculators",
            tensors | {"t2d": torch.ones(3)},
            {
                "speculators_model_type": "dflash",
                "transformer_layer_config": settings,
                "aux_hidden_state_layer_ids": list(TAPS),
                "mask_token_id": dflash_files.MASK,
            },
        ),
        write_gguf(tmp_path / "gguf", tensors),
    ]
    results = []
    for folder in folders:
        model = model_of(folder)
        assert model.form.taps == TAPS and found_in(folder).label == "DFlash"
        cache = model.cache(32)
        torch.manual_seed(5)
        model.read(torch.randn(4, 2, HIDDEN), cache)
        results.append(model(3, cache))
    for other in results[1:]:
        assert torch.allclose(results[0], other, atol=1e-5)


def test_without_named_layers_they_are_spread_over_the_backbone(tmp_path):
    settings = dflash_files.config(HIDDEN)
    del settings["dflash_config"]["target_layer_ids"]
    found = found_in(write(tmp_path, dflash_files.tensors(HIDDEN, taps=5), settings))
    assert found.taps(36) == (2, 10, 18, 26, 34)  # Qwen3-8B's 1, 9, 17, 25, 33, and one more


def test_relatives_are_told_apart(tmp_path):
    tensors, settings = dflash_files.tensors(HIDDEN), dflash_files.config(HIDDEN)
    jet = settings["dflash_config"] | {"causal_head": True}
    found = found_in(write(tmp_path / "a", tensors, settings | {"dflash_config": jet}))
    assert (found.label, found.is_causal, found.reads_root) == ("JetSpec", (True, True), False)
    spark = tensors | dflash_files.markov(VOCABULARY)
    found = found_in(write(tmp_path / "b", spark, settings))
    assert (found.label, found.reads_root) == ("DSpark", True)
    named = {"architectures": ["Qwen3DSparkModel"]}
    found = found_in(write(tmp_path / "c", tensors, settings | named))
    assert (found.label, found.reads_root) == ("DFlash", True)


@pytest.mark.parametrize(
    ("extra", "changes", "said"),
    [
        ({"candidate_selector.predecessor_codebook": torch.zeros(4)}, {}, "is a DFlash 2 drafter"),
        ({"layers.0.self_attn.attention_sink_bias": torch.zeros(4)}, {}, "attention sinks"),
        ({"markov_head.gate_proj.weight": torch.zeros(4)}, {}, "a gated head"),
        ({"layers.0.g_proj.weight": torch.zeros(4)}, {}, "unexpected tensor 'layers.0.g_proj"),
        ({"fc.weight": torch.zeros(32, 70)}, {}, "no whole number of states"),
        ({}, {"taps": (2, 7)}, "reads the layers [2, 7] and 2 states, and the backbone has 6"),
        ({}, {"taps": (1, 2, 3)}, "and 2 states"),
        ({}, {"block_size": None}, "has block_size None"),
        ({}, {"num_key_value_heads": 1}, "was expected by its config"),
        ({"norm.weight": torch.full((32,), torch.nan)}, {}, "NaN"),
        ({}, {"dflash_config": {"mask_token_id": 999}}, "masks by token 999"),
        ({"embed_tokens.weight": torch.zeros(40, 32)}, {}, "its own table has 40 tokens"),
        ({"embed_tokens.weight": torch.zeros(48, 31)}, {}, "embed_tokens.weight is (48, 31), (n, "),
        ({"lm_head.weight": torch.zeros(48, 31)}, {}, "lm_head.weight is (48, 31), (n, 32) was"),
        ({"norm.weight": torch.zeros(31)}, {}, "norm.weight is (31,), (32,) was expected"),
        ({"hidden_norm.weight": torch.zeros(31)}, {}, "hidden_norm.weight is (31,), (32,) was"),
        ({"fc.weight": torch.zeros(0, 64)}, {}, "fc.weight is (0, 64), (n, n) was expected"),
        ({"fc.weight": torch.zeros(32)}, {}, "fc.weight is (32,), (n, n) was expected"),
        ({"layers.0.mlp.up_proj.bias": torch.zeros(3)}, {}, "mlp.up_proj.bias is (3,), (48,) was"),
        ({W1: torch.zeros(48, 4)}, {}, f"lacks {W2}"),
        ({W2: torch.zeros(48, 4)}, {}, f"lacks {W1}"),
        ({W1: torch.zeros(48, 4), W2: torch.zeros(48, 5)}, {}, f"{W2} is (48, 5), (n, 4) was"),
        ({W1: torch.zeros(48, 4), W2: torch.zeros(47, 4)}, {}, "adds to 47 tokens"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(tmp_path, extra, changes, said):
    tensors = dflash_files.tensors(HIDDEN) | extra
    folder = write(tmp_path, tensors, dflash_files.config(HIDDEN, **changes))
    with pytest.raises(ModelError) as refused:
        model_of(folder)
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"heads": None}, "attention.head_count is None and its head_count_kv 2"),
        ({"heads": [4, 4]}, "attention.head_count is [4, 4]"),
        ({"pattern": 4}, "sliding_window_pattern is 4, where a list"),
    ],
)
def test_a_gguf_file_with_odd_numbers_is_refused_in_a_line(tmp_path, given, said):
    folder = write_gguf(tmp_path / "a", dflash_files.tensors(HIDDEN), **given)
    with pytest.raises(ModelError) as refused:
        model_of(folder)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_weights_beside_a_config_are_read_before_gguf_files(tmp_path):
    tensors = dflash_files.tensors(HIDDEN)
    folder = write(write_gguf(tmp_path / "a", tensors), tensors, dflash_files.config(HIDDEN, TAPS))
    assert [path.name for path in found_in(folder).paths] == ["model.safetensors"]
    (folder / "other.gguf").write_bytes((folder / "drafter.gguf").read_bytes())
    assert [path.name for path in found_in(folder).paths] == ["model.safetensors"]


def test_one_gguf_file_is_read_and_of_several_none_is_taken(tmp_path):
    folder = write_gguf(tmp_path / "a", dflash_files.tensors(HIDDEN))
    (folder / "README.md").write_text("a drafter")
    assert found_in(folder).is_gguf
    for other in ("other.gguf", "model-00001-of-00002.safetensors"):
        (folder / other).write_bytes((folder / "drafter.gguf").read_bytes())
        assert found_in(folder) is None
        (folder / other).unlink()


def test_a_gguf_file_names_its_sliding_layers(tmp_path):
    folder = write_gguf(tmp_path / "a", dflash_files.tensors(HIDDEN), pattern=[True, False])
    assert model_of(folder).form.windows == (16, None)


def test_the_backbone_of_another_width_is_refused(tmp_path):
    found = found_in(write(tmp_path, dflash_files.tensors(HIDDEN), dflash_files.config(HIDDEN)))
    with pytest.raises(ModelError, match="reads states of 32 numbers, and the backbone's have 64"):
        found.refuse_other(Sizes(64, 6, VOCABULARY))
    with pytest.raises(ModelError, match="was trained on a model of 48 tokens, and the backbone"):
        found.refuse_other(Sizes(32, 6, 32_000))


def test_it_is_told_what_it_is_and_needs(tmp_path):
    folder = write(tmp_path, dflash_files.tensors(HIDDEN), dflash_files.config(HIDDEN, TAPS))
    report = "\n".join(inspect(str(folder)).lines())
    assert "DFlash, 2 layers of width 32, 5 tokens in one pass, reads 2 layers of its" in report
    assert "whose states have 32 numbers, and which has more than 4 layers" in report
    assert "to download and to hold" in report
    with pytest.raises(ModelError, match="is a DFlash drafter, not a model: load the model"):
        Checkpoint.find(LoadRequest(str(folder)))
