"""Heads that ship for a tiny backbone: a preset, heads, a calibration, in place of ours."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from medusa_chat import paths
from medusa_chat.checkpoints import places
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.hub import catalog
from support.checkpoints import write_heads
from support.gguf_models import tiny_model

NAME, BASE = "tiny-heads", "someone/Tiny-1M-Instruct"
SHAPE = ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")
PRESET = """
[[model]]
id = "{name}"
title = "Tiny: smaller than small"
layout = "B"
shape = "tiny"
base = "{base}"
ships = "heads/tiny"
heads = 3
base_bytes = 100_000
licence = "apache-2.0"

[shapes.tiny]
model_type = "llama"
max_position_embeddings = 256
"""
CALIBRATION = {
    "accuracies": [[0.6, 0.1], [0.5, 0.1], [0.4, 0.1]],
    "choices": [[0], [0, 0], [1], [0, 0, 0]],
}


@pytest.fixture
def shipping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the heads; their preset is the only one."""
    model, folder = tiny_model(), tmp_path / "assets" / "heads" / "tiny"
    folder.mkdir(parents=True)
    write_heads(folder, MedusaHeads(3, model.config.hidden_size))
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "version": "2"}))
    (folder / "medusa_calibration.json").write_text(json.dumps(CALIBRATION))
    sizes = "\n".join(f"{key} = {getattr(model.config, key)}" for key in SHAPE)
    (tmp_path / "models.toml").write_text(PRESET.format(name=NAME, base=BASE) + sizes)
    real = paths.preset, paths.asset

    def preset(*parts: str) -> Path:
        return tmp_path / "models.toml" if parts == ("models.toml",) else real[0](*parts)

    def asset(*parts: str) -> Path:
        return folder if parts == ("heads/tiny",) else real[1](*parts)

    monkeypatch.setattr(catalog.paths, "preset", preset)
    monkeypatch.setattr(places, "asset", asset)
    catalog.model_presets.cache_clear()
    catalog.shape.cache_clear()
    catalog._drafters.cache_clear()
    yield folder
    catalog.model_presets.cache_clear()
    catalog.shape.cache_clear()
    catalog._drafters.cache_clear()
