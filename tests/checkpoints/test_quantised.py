"""A backbone that was quantised once is read again without its source, or not at all."""

import os
import resource
import subprocess
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import write_checkpoint
from support.families import tiny
from support.quantised import opened, texts
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from medusa_chat import paths
from medusa_chat.checkpoints import kept_copies, native_build, tree_check
from medusa_chat.checkpoints.kept_copies import KeptCopy, belongs
from medusa_chat.checkpoints.tree_check import check_plain_steps, check_tree_step
from medusa_chat.cli.main import main
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.errors import ModelError
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.worker import Worker


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """With one, our C multiplies on a CPU, and nothing is kept."""
    monkeypatch.setenv(native_build.PLACE, "0")


def test_what_int8_does_to_activations_is_no_fault_of_the_tree(tmp_path, monkeypatch):
    model = tiny("llama", num_hidden_layers=16)
    for name, weight in model.model.layers.named_parameters():
        if "norm" not in name:
            weight.data *= 1.5  # 0.25 of the largest logit by rounding alone
    model.save_pretrained(tmp_path)
    rounded = BitsAndBytesConfig(load_in_8bit=True)
    kinds = {"dtype": torch.float16, "quantization_config": rounded}
    backbone = Backbone(AutoModelForCausalLM.from_pretrained(tmp_path, **kinds).eval(), 64)
    assert check_tree_step(backbone) < 0.01 and check_plain_steps(backbone) < 0.1
    with monkeypatch.context() as patch, pytest.raises(ModelError, match=r"more than 0\.05"):
        patch.setattr(tree_check, "_unrounded_activations", nullcontext)
        check_tree_step(backbone)
    assert not any(module._forward_hooks for module in backbone.model.modules())
    backbone.windows = (3,)  # a window that the model does not have
    with pytest.raises(ModelError, match="differs from transformers' eager attention"):
        check_plain_steps(backbone)


def blank(file):
    """Overwrite the data behind a file's header; its size and time of change stay."""
    stat = file.stat()
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes(data[:start] + bytes(len(data) - start))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_the_second_load_reads_nothing_of_the_source_and_says_the_same(tmp_path, precision):
    folder = write_checkpoint(tmp_path / "model")
    names, model = opened(folder, precision)
    assert "quantise" in names
    first = texts(model)
    tensors = load_file(folder / "model.safetensors").values()
    assert model.info.parameters == sum(tensor.numel() for tensor in tensors)
    (kept,) = kept_copies.kept()
    assert (kept.name, kept.precision) == (str(folder), precision)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    blank(file)
    names, model = opened(folder, precision)
    assert "quantise" not in names and texts(model) == first
    assert any("quantised before" in note for note in model.info.notes)
    file.write_bytes(data)  # changed since, as far as one can tell without reading it
    names, model = opened(folder, precision)
    assert "quantise" in names and texts(model) == first
    assert len(kept_copies.kept()) == 1  # that of the source as it was is gone


def test_a_damaged_copy_is_made_anew(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    first = texts(opened(folder, "nf4")[1])
    (kept,) = kept_copies.kept()
    file = kept.folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert texts(opened(folder, "nf4")[1]) == first
    assert texts(opened(folder, "nf4")[1]) == first and len(kept_copies.kept()) == 1


def test_a_full_disk_leaves_nothing_half_written_and_the_model_loads(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        _, model = opened(folder, "nf4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert any("not kept" in note for note in model.info.notes)
    assert kept_copies.kept() == () and not list((paths.cache_dir() / "quantised").iterdir())


def test_models_lists_what_is_kept_and_rm_frees_it(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "model")
    opened(folder, "nf4")
    size = kept_copies.kept()[0].bytes
    assert main(["models", "list"]) == 0
    assert f"{folder}  (nf4" in capsys.readouterr().out
    assert main(["models", "rm", str(folder), "--json"]) == 0
    assert str(size) in capsys.readouterr().out and kept_copies.kept() == ()
    assert main(["models", "rm", str(folder)]) == 4


def test_every_tensor_of_the_old_model_is_gone_before_the_next_is_read(tmp_path):
    folders = [write_checkpoint(tmp_path / name) for name in ("one", "two")]
    worker = Worker()
    watched = []
    for turn in range(6):
        for phase in worker.handle(LoadRequest(str(folders[turn % 2]))):
            if phase.name == "read":
                assert not [ref for ref in watched if ref() is not None]
        engine = worker.loaded.engine
        parts = [*engine.backbone.model.parameters(), *engine.heads.parameters()]
        watched = [weakref.ref(tensor) for tensor in [*parts, *engine.backbone.cache._blocks]]
        del engine, parts


@pytest.mark.parametrize(
    ("name", "is_of_it"),
    [("owner/repo", True), ("owner/repo/a.gguf", True), ("owner", False), ("", False)],
)
def test_a_copy_is_of_its_file_and_of_its_repo_and_of_no_other(name: str, is_of_it: bool) -> None:
    copy = KeptCopy("gguf", "owner/repo/a.gguf", "/hub/a.gguf", "bf16", 1, Path("x"))
    assert belongs(copy, name) is is_of_it
    assert not belongs(replace(copy, name=str(Path("a.gguf").resolve())), name)


def test_half_copies_of_processes_that_were_killed_go_before_the_disk_is_looked_at():
    """They stayed for a day, and a model that did not fit beside them was refused."""
    root, origin = kept_copies.root("converted"), kept_copies.Origin("a", "b", "c")
    code = """if True:
        import os, signal, sys
        from pathlib import Path
        from medusa_chat.checkpoints import kept_copies
        with kept_copies.writing(Path(sys.argv[1]), kept_copies.Origin("a", "b", "c")) as partial:
            (partial / "file").write_text("x")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    root.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", code, str(root / "copy")])
    (left,) = root.glob(".part-*")
    with kept_copies.writing(root / "copy", origin) as partial:
        assert left.is_dir() and kept_copies.has_room(root / "other", 1) and not left.exists()
        (partial / "file").write_text("x")
    assert (root / "copy" / "file").is_file() and [f.name for f in root.iterdir()] == ["copy"]


def test_a_copy_that_another_process_deletes_too_is_gone(monkeypatch):
    folder = kept_copies.root("converted") / "copy"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with kept_copies.writing(folder, kept_copies.Origin("a", "b", "c")) as partial:
        (partial / "file").write_text("x")
    shown = kept_copies.kept()
    monkeypatch.setattr(kept_copies, "kept", lambda: shown)
    for _ in range(2):
        kept_copies.remove("a")
        assert not folder.exists()
