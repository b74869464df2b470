"""EAGLE drafters: every layout gives one drafter, whose numbers are the formulas'."""

import gguf
import numpy as np
import pytest
import torch
from support import eagle_files
from support.families import VOCABULARY, tiny
from support.followers import write
from support.pickles import pickles_here  # noqa: F401
from torch.nn import functional as F

from medusa_chat.checkpoints.eagle_weights import read_eagle
from medusa_chat.checkpoints.inspection import inspect
from medusa_chat.checkpoints.layouts.drafter_file import Sizes
from medusa_chat.checkpoints.layouts.drafters import drafter_in
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.decoding.drafters.own_layers import Lent
from medusa_chat.errors import ModelError
from medusa_chat.messages import LoadRequest

CPU = torch.device("cpu")
HIDDEN, LAYERS = 32, 8
IDS = [2, 4, 5]  # the default for 8 layers


def found_in(folder, only=None):
    return drafter_in(LocalFolder(folder, only=only))


def model_of(folder, only=None, backbone=None):
    found = found_in(folder, only)
    embedding = torch.nn.Embedding(VOCABULARY, HIDDEN) if backbone is None else backbone[0]
    head = torch.nn.Linear(HIDDEN, VOCABULARY) if backbone is None else backbone[1]
    sizes = Sizes(HIDDEN, LAYERS, VOCABULARY)
    return read_eagle(found, Lent(embedding, head), sizes, CPU, torch.float32)


def given(model, rows=3, seed=5):
    """A pass of rows from taps, causal -> what is fed back, and log probabilities."""
    torch.manual_seed(seed)
    taps = torch.randn(rows, len(model.form.taps) or 1, HIDDEN)
    states = model.fused(taps[:, 0], taps)
    tokens, places = torch.tensor([3, 9, 17])[:rows], torch.arange(rows)
    return model(states, tokens, places, None, model.cache(16)), taps, tokens


def prefixed(tensors, prefix):
    kept = ("lm_head.weight", "d2t")
    return {name if name in kept else prefix + name: t for name, t in tensors.items()}


def write_gguf(folder, tensors):
    """The file as llama.cpp's converter writes it: rows of q and k in pairs, ids in d2t."""
    names = {
        "fc": "fc",
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "lm_head": "output",
        "layers.0.input_layernorm": "blk.0.attn_norm",
        "layers.0.hidden_norm": "blk.0.attn_norm_2",
        "layers.0.post_attention_layernorm": "blk.0.ffn_norm",
        **{f"layers.0.self_attn.{x}_proj": f"blk.0.attn_{x}" for x in "qkv"},
        "layers.0.self_attn.o_proj": "blk.0.attn_output",
        **{f"layers.0.mlp.{x}_proj": f"blk.0.ffn_{x}" for x in ("gate", "up", "down")},
    }
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "drafter.gguf", "eagle3")
    sizes = eagle_files
    writer.add_embedding_length(sizes.WIDTH)
    writer.add_feed_forward_length(sizes.INNER)
    writer.add_head_count(sizes.HEADS)
    writer.add_head_count_kv(sizes.KEYS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_context_length(256)
    writer.add_rope_dimension_count(sizes.WIDTH // sizes.HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_array("eagle3.target_layers", IDS)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    for name, tensor in tensors.items():
        if name == "d2t":
            ids = tensor + torch.arange(len(tensor))
            writer.add_tensor("d2t", ids.numpy().astype(np.int64))
            continue
        heads = {"q": sizes.HEADS, "k": sizes.KEYS}.get(name.split(".")[-2].removesuffix("_proj"))
        if heads:
            split = tensor.view(heads, 2, -1, tensor.shape[1])
            tensor = split.transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{names[name.removesuffix('.weight')]}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def test_every_layout_is_one_drafter(tmp_path):
    tensors, settings = eagle_files.eagle_3(HIDDEN, VOCABULARY), eagle_files.config()
    official = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    official["t2d"] = torch.ones(VOCABULARY, dtype=torch.bool)
    inner = {key: settings.pop(key) for key in ("hidden_size", "intermediate_size")}
    nested = eagle_files.config(
        eagle_config={"eagle_aux_hidden_state_layer_ids": [i - 1 for i in IDS]}
    )
    folders = [
        write(tmp_path / "official", official, settings | inner, "pytorch_model.bin"),
        write(tmp_path / "sglang", official, nested),
        write(
            tmp_path / "speculators",
            tensors,
            {
                "speculators_model_type": "eagle3",
                "transformer_layer_config": settings | inner,
                "eagle_aux_hidden_state_layer_ids": IDS,
            },
        ),
        write(tmp_path / "nemo", prefixed(tensors, "model."), settings | inner),
        write_gguf(tmp_path / "gguf", tensors),
    ]
    results = []
    for folder in folders:
        model = model_of(folder, "drafter.gguf" if folder.name == "gguf" else None)
        assert model.form.taps == tuple(IDS)
        results.append((*given(model)[0], model.ids))
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert torch.allclose(mine.double(), theirs.double(), atol=1e-5)


def by_hand(tensors, taps, tokens, is_normed_first=False, feeds_norm=False):
    """The formulas, row by row."""

    def norm(name, x):
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * tensors[name]

    def part(name, x):
        return x @ tensors[f"layers.0.{name}.weight"].T

    hidden = part_fc = taps.flatten(1) @ tensors["fc.weight"].T
    embedded = F.embedding(tokens, tensors["embed_tokens.weight"])
    states = norm("layers.0.hidden_norm.weight", part_fc)
    residual = states if is_normed_first else hidden
    z = torch.cat([norm("layers.0.input_layernorm.weight", embedded), states], -1)
    heads, width = eagle_files.HEADS, eagle_files.WIDTH // eagle_files.HEADS
    split = [part(f"self_attn.{x}_proj", z).view(len(z), -1, width) for x in "qkv"]
    q, k, v = (
        rows if rows.shape[1] == heads else rows.repeat_interleave(heads // eagle_files.KEYS, 1)
        for rows in split
    )
    angles = torch.arange(len(z))[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def turned(x):
        a, b = x[..., : width // 2], x[..., width // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    q, k = turned(q), turned(k)
    mixed = []
    for i in range(len(z)):
        scores = torch.einsum("hd,jhd->hj", q[i], k[: i + 1]) / width**0.5
        mixed.append(torch.einsum("hj,jhd->hd", scores.softmax(-1), v[: i + 1]).flatten())
    y = residual + part("self_attn.o_proj", torch.stack(mixed))
    x = norm("layers.0.post_attention_layernorm.weight", y)
    out = y + part("mlp.down_proj", F.silu(part("mlp.gate_proj", x)) * part("mlp.up_proj", x))
    last = norm("norm.weight", out)
    scores = (last @ tensors["lm_head.weight"].T).log_softmax(-1)
    return last if feeds_norm else out, scores


@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True}, {"norm_output": True}])
def test_a_pass_is_the_formulas(tmp_path, changes):
    tensors = eagle_files.eagle_3(HIDDEN, VOCABULARY)
    model = model_of(write(tmp_path / "a", tensors, eagle_files.config(**changes)))
    (out, scores), taps, tokens = given(model)
    expected = by_hand(tensors, taps, tokens, *[changes.get(n, False) for n in FLAGS])
    assert torch.allclose(out, expected[0], atol=1e-4)
    assert torch.allclose(scores, expected[1], atol=1e-4)


FLAGS = ("norm_before_residual", "norm_output")


def test_norms_before_the_sum_are_read(tmp_path):
    tensors = eagle_files.eagle_3(HIDDEN, VOCABULARY)
    plain = model_of(write(tmp_path / "a", tensors, eagle_files.config()))
    ones = {f"fc_norm.{i}.weight": torch.ones(HIDDEN) for i in range(3)}
    each = model_of(write(tmp_path / "b", tensors | ones, eagle_files.config()))
    whole = {"input_norm.weight": torch.ones(3 * HIDDEN)}
    all_at_once = model_of(write(tmp_path / "c", tensors | whole, eagle_files.config()))
    assert found_in(tmp_path / "b").label == "EAGLE-3.1"
    taps = torch.randn(2, 3, HIDDEN)
    normed = taps * (taps.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    flat = taps.flatten(1)
    flat = flat * (flat.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert torch.allclose(each.fused(taps[:, 0], taps), plain.fused(taps[:, 0], normed), atol=1e-5)
    got = all_at_once.fused(taps[:, 0], taps)
    assert torch.allclose(got, plain.fused(taps[:, 0], flat.view(2, 3, HIDDEN)), atol=1e-5)


@pytest.mark.parametrize("has_bias", [True, False])
def test_eagle_1_has_the_embedding_before_the_state_and_no_last_norm(tmp_path, has_bias):
    tensors = eagle_files.eagle_1(HIDDEN, has_bias)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"].zero_()
    settings = eagle_files.config(hidden_size=HIDDEN)
    backbone = torch.nn.Embedding(VOCABULARY, HIDDEN), torch.nn.Linear(HIDDEN, VOCABULARY)
    folder = write(tmp_path / "a", tensors, settings)
    assert found_in(folder).label == "EAGLE-1"
    model = model_of(folder, backbone=backbone)
    (out, scores), states, tokens = given(model)
    both = torch.cat([backbone[0](tokens), states[:, 0]], -1)
    expected = F.linear(both, tensors["fc.weight"], tensors.get("fc.bias"))
    assert torch.allclose(out, expected, atol=1e-5)
    assert torch.allclose(scores, backbone[1](expected).log_softmax(-1), atol=1e-5)


@pytest.mark.parametrize(
    ("extra", "changes", "said"),
    [
        ({"mask_hidden": torch.zeros(4)}, {}, "P-EAGLE"),
        ({"g_proj.weight": torch.zeros(4)}, {}, "unexpected tensor 'g_proj.weight'"),
        ({"fc.weight": torch.zeros(48, 70)}, {}, "states of 70 numbers"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "has 8 layers"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [2, 4]}, "and 3 states"),
        ({}, {"num_key_value_heads": 4}, "(48, 96) was expected"),
        ({"norm.weight": torch.full((48,), torch.nan)}, {}, "NaN"),
        ({"fc.weight": torch.zeros(48)}, {}, "fc.weight is (48,), (n, n) was expected"),
        ({"norm.weight": torch.zeros(47)}, {}, "norm.weight is (47,), (48,) was expected"),
        ({"lm_head.weight": torch.zeros(48, 47)}, {}, "lm_head.weight is (48, 47), (n, 48) was"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(tmp_path, extra, changes, said):
    tensors = eagle_files.eagle_3(HIDDEN, VOCABULARY) | extra
    folder = write(tmp_path / "a", tensors, eagle_files.config(**changes))
    with pytest.raises(ModelError) as refused:
        model_of(folder)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_as_a_model_it_is_refused_with_what_to_do(tmp_path):
    tensors, settings = eagle_files.eagle_3(HIDDEN, VOCABULARY), eagle_files.config(vocab_size=48)
    folder = str(write(tmp_path / "a", tensors, settings))
    with pytest.raises(ModelError, match="is an EAGLE-3 drafter, not a model: load the model"):
        Checkpoint.find(LoadRequest(folder))
    report = list(inspect(folder).lines())
    assert "  drafter   EAGLE-3, 1 layer of width 48, reads 96 numbers a token" in report[1]


def test_a_model_is_no_drafter(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    assert found_in(tmp_path) is None
