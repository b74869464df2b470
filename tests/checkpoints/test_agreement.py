"""`inspect` and `generate` say the same of a broken checkpoint, each in one line."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import layout_i, write_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_chat.cli.main import main

WEIGHTS = "model.safetensors"
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("agreement") / "model")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


def codes(folder: Path, capsys: Any) -> list[tuple[int, str]]:
    """(exit code, last line of stderr) of inspect and of generate."""
    found = []
    asked = ["generate", "--raw", "--prompt", "x", "--max-new-tokens", "1", "--precision", "fp32"]
    for command in (["inspect", str(folder)], [*asked, "--checkpoint", str(folder)]):
        code = main(command)
        lines = capsys.readouterr().err.splitlines()
        found.append((code, lines[-1] if lines else ""))
        assert "Traceback" not in "".join(lines)
    return found


def test_both_take_a_checkpoint_that_is_whole(folder: Path, capsys: Any) -> None:
    assert [code for code, _ in codes(folder, capsys)] == [0, 0]


# The weights.


def change(folder: Path, how: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    how(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def with_header(folder: Path, how: Callable[[dict[str, Any]], Any]) -> None:
    """The same bytes of data under another header."""
    raw = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    how(header)
    text = json.dumps(header).encode()
    size = len(text).to_bytes(8, "little")
    (folder / WEIGHTS).write_bytes(size + text + raw[8 + length :])


def overlap(header: dict[str, Any]) -> None:
    names = [name for name in header if "up_proj" in name]
    header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]


class Command:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/medusa-chat-was-here",)


def pickled(folder: Path, value: Any) -> None:
    (folder / WEIGHTS).unlink()
    torch.save(value, folder / "pytorch_model.bin")


def sparse(folder: Path) -> None:
    tensors = dict(load_file(folder / WEIGHTS))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].to_sparse()
    pickled(folder, tensors)


def bomb(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"\0" * 10_000_000)


def cut(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size // 2)


def holes(folder: Path) -> None:
    """A file of the right size without content, as a download that was begun."""
    size = (folder / WEIGHTS).stat().st_size
    (folder / WEIGHTS).write_bytes(b"")
    os.truncate(folder / WEIGHTS, size)


def index(folder: Path, table: Any) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": table}))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
BROKEN: dict[str, Callable[[Path], Any]] = {
    "empty": lambda f: (f / WEIGHTS).write_bytes(b""),
    "cut": cut,
    "holes": holes,
    "a pointer": lambda f: (f / WEIGHTS).write_bytes(POINTER),
    "a web page": lambda f: (f / WEIGHTS).write_bytes(b"<!DOCTYPE html><html></html>"),
    "not there": lambda f: (f / WEIGHTS).unlink(),
    "overlapping": lambda f: with_header(f, overlap),
    "a sparse tensor": sparse,
    "a command": lambda f: pickled(f, {"model.embed_tokens.weight": Command()}),
    "a zip bomb": bomb,
    "misshapen": lambda f: change(
        f, lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 32)})
    ),
    "too few tokens": lambda f: change(
        f, lambda t: t.update({"model.embed_tokens.weight": torch.zeros(200, 32)})
    ),
    "a missing tensor": lambda f: change(f, lambda t: t.pop("model.norm.weight")),
    "a missing layer": lambda f: change(
        f, lambda t: [t.pop(name) for name in list(t) if ".layers.1." in name]
    ),
    "a missing shard": lambda f: index(f, {"model.norm.weight": "model-2-of-2.safetensors"}),
    "a path in the index": lambda f: index(f, {"model.norm.weight": "../model.safetensors"}),
    "no tokenizer": lambda f: (f / "tokenizer.json").unlink(),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("has_heads", [True, False], ids=["heads", "alone"])
def test_both_refuse_broken_weights(folder: Path, capsys: Any, kind: str, has_heads: bool) -> None:
    """inspect found no problem in a model that lay beside a file of heads."""
    if not has_heads:
        (folder / "medusa_lm_head.safetensors").unlink()
    BROKEN[kind](folder)
    assert [code for code, _ in codes(folder, capsys)] == [4, 4]
    assert not Path("/tmp/medusa-chat-was-here").exists()


FAMILIES = {
    "gpt_neox": {"num_attention_heads": 2, "intermediate_size": 64},
    "phi": {"num_attention_heads": 2, "intermediate_size": 64},
    "mixtral": {
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64},
        "num_local_experts": 2,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_both_refuse_a_misshapen_tensor_of_any_family(
    folder: Path, capsys: Any, family: str
) -> None:
    """The shapes of the other families follow from transformers' own code alone."""
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": rows}
    config = AutoConfig.for_model(family, **sizes, **FAMILIES[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    assert [code for code, _ in codes(folder, capsys)] == [0, 0]
    whole = load_file(folder / WEIGHTS)
    names = [name for name in whole if ".layers.1." in name and name.endswith("weight")]
    for name in (names[0], names[-1], next(n for n in names if "exp" in n or "mlp" in n)):
        save_file(whole | {name: torch.zeros(3, 5)}, folder / WEIGHTS, {"format": "pt"})
        assert [code for code, _ in codes(folder, capsys)] == [4, 4], name


# The settings files.

FILES = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"),
    *("special_tokens_map.json", "added_tokens.json", "medusa_calibration.json"),
    *("adapter_config.json", "model.safetensors.index.json"),
)
TEXTS = ("5", '"x"', "[1]", "null", "true", "", "NaN", DEEP, '{"a":' * 100_000, "\udcff")
IGNORED = {"model.safetensors.index.json"}  # beside a single file of weights


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_holds_no_object_is_one_line(folder: Path, capsys: Any, name: str) -> None:
    for text in TEXTS:
        (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
        (inspected, _), (code, line) = codes(folder, capsys)
        assert code in ((0, 4) if name in IGNORED else (4,)), (name, text[:10], line)
        assert line.count("\n") == 0
        assert inspected == code, (name, text[:10], line)


def edited(folder: Path, name: str, **values: Any) -> None:
    file = folder / name
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | values))


@pytest.mark.parametrize(
    ("values", "method"),
    [
        ({"quantization_config": {"quant_method": "aqlm"}}, "aqlm"),
        ({"quantization": {"group_size": 32, "bits": 4}}, "MLX"),
        ({"quantization": {"bits": 4}, "quantization_config": {"bits": 4}}, "MLX"),
    ],
)
def test_both_refuse_a_quantisation_that_is_not_read_by_its_name(
    folder: Path, capsys: Any, values: dict[str, Any], method: str
) -> None:
    edited(folder, "config.json", **values)
    for code, line in codes(folder, capsys):
        assert code == 4 and f"quantised by {method}, which cannot be read here: use" in line


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model-00001-of-00002.safetensors", "safetensors.index.json is missing: download it"),
        ("model.fp16.safetensors", "rename it to model.safetensors"),
    ],
)
def test_both_refuse_weights_that_nothing_names(
    folder: Path, capsys: Any, name: str, says: str
) -> None:
    (folder / WEIGHTS).rename(folder / name)
    for code, line in codes(folder, capsys):
        assert code == 4 and says in line


def test_both_refuse_an_adapter_with_saved_modules(folder: Path, capsys: Any) -> None:
    layout_i(folder.parent / "tuned", folder)
    edited(folder.parent / "tuned", "config.json", base_model_name_or_path="../model")
    edited(folder.parent / "tuned", "adapter_config.json", modules_to_save=["lm_head"])
    for code, line in codes(folder.parent / "tuned", capsys):
        assert code == 4 and "give a plain LoRA adapter" in line


MANY = list(range(1_000_000))
ODD = (-5, "x", [1], 1.5, 10**30, True)
CONFIG = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "text_config", "rope_parameters"),
    *("rope_scaling", "sliding_window", "layer_types", "quantization_config"),
)


@pytest.mark.parametrize("key", CONFIG)
def test_a_config_with_an_odd_value_is_one_line(folder: Path, capsys: Any, key: str) -> None:
    for value in ODD:
        edited(folder, "config.json", **{key: value})
        (inspected, _), (code, line) = codes(folder, capsys)
        assert code in (0, 2, 4) and inspected in (0, 4), (key, value, line)
        assert inspected == 0 or code != 0, (key, value, line)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("config.json", {"quantization_config": {"quant_method": "foreign"}}),
        ("config.json", {"max_position_embeddings": -5}),
        ("config.json", {"text_config": {"a": 1}}),
        ("config.json", {"num_attention_heads": 2, "num_key_value_heads": 8}),
        ("config.json", {"rope_parameters": []}),
        ("config.json", {"rope_parameters": {"rope_type": "foreign"}}),
        ("config.json", {"eos_token_id": MANY}),
        ("generation_config.json", {"compile_config": 5}),
        ("generation_config.json", {"compile_config": {"a": 1}}),
        ("generation_config.json", {"eos_token_id": "x"}),
        ("generation_config.json", {"eos_token_id": MANY}),
        ("tokenizer_config.json", {"chat_template": 5}),
        ("medusa_calibration.json", {"accuracies": [[0.5]], "choices": [[10**30]]}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_value_that_ended_in_a_traceback_is_one_line(
    folder: Path, capsys: Any, name: str, values: dict[str, Any]
) -> None:
    edited(folder, name, **values)
    (_, _), (code, line) = codes(folder, capsys)
    assert code in (0, 2, 4), line
    if values.get("eos_token_id") == MANY:  # each is looked for at every step
        assert code == 4 and "has end tokens, 1,000,000 of them: at most" in line


def grow(tokenizer: dict[str, Any], part: str, **steps: Any) -> None:
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    tokenizer[part] = {"type": "Sequence", steps.get("key", f"{part}s"): [double] * 40}


def add(tokenizer: dict[str, Any], count: int) -> None:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    tokenizer["added_tokens"] = [
        {"id": 1000 + i, "content": f"<{i}>"} | dict.fromkeys(flags, False) for i in range(count)
    ]


@pytest.mark.parametrize(
    "how",
    [
        lambda t: grow(t, "normalizer"),
        lambda t: grow(t, "decoder"),
        lambda t: add(t, 300_000),
    ],
    ids=["normalizer", "decoder", "added tokens"],
)
def test_both_refuse_a_tokenizer_that_works_without_end(
    folder: Path, capsys: Any, how: Callable[[dict[str, Any]], Any]
) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    how(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert [code for code, _ in codes(folder, capsys)] == [4, 4]
