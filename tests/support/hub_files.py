"""A Hub stand-in with repos of heads and of backbones."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from medusa_chat.hub import download
from support.hub_server import Hub, HubRepo, serving

MB = 1_000_000
BASE, HEADS, WHOLE = "someone/base", "someone/medusa-heads", "someone/medusa-whole"
SHARD = "model-00001-of-00002.safetensors"
BASE_FILE = "base.Q4_K_M.gguf"


def weights(size: int, seed: int = 1) -> bytes:
    return bytes((i * seed + (i >> 8)) % 251 for i in range(4096)) * (size // 4096 + 1)


def index_of(*shards: str, tensor: str = "model.layers.{}.weight") -> bytes:
    table = {tensor.format(number): shard for number, shard in enumerate(shards)}
    return json.dumps({"weight_map": table}).encode()


def text(**values: Any) -> bytes:
    return json.dumps(values).encode()


def base_files() -> dict[str, bytes]:
    """A backbone in both formats, with what nobody needs."""
    return {
        "README.md": b"about",
        "config.json": text(model_type="llama"),
        "generation_config.json": b"{}",
        "tokenizer.json": b"{}" * 50,
        "tokenizer_config.json": text(model_max_length=64),
        SHARD: weights(200_000, 3),
        "model-00002-of-00002.safetensors": weights(100_000, 5),
        "model-00001-of-00003.safetensors": b"of another upload",
        "model.safetensors.index.json": index_of(SHARD, "model-00002-of-00002.safetensors"),
        "pytorch_model.bin": weights(300_000, 7),
        "original/consolidated.00.pth": weights(300_000),
        BASE_FILE: weights(100_000),
        "modeling_evil.py": b"print('no')",
        "tf_model.h5": weights(100),
    }


def heads_files(base: str = BASE) -> dict[str, bytes]:
    return {
        "config.json": text(base_model_name_or_path=base, medusa_num_heads=2),
        "medusa_lm_head.pt": weights(50_000, 11),
        "medusa_lm_head.safetensors": weights(50_000, 13),
        "README.md": b"about",
        "optimizer.pt": weights(1000),
    }


def whole_files() -> dict[str, bytes]:
    """Medusa-2: heads among the tensors of a whole model."""
    return {
        "config.json": text(model_type="llama"),
        "tokenizer.model": weights(3000),
        "pytorch_model-00001-of-00001.bin": weights(80_000, 17),
        "pytorch_model.bin.index.json": index_of(
            "pytorch_model-00001-of-00001.bin", tensor="medusa_head.{}.0.linear.weight"
        ),
    }


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub with a base, heads for it and a whole model; an empty cache, nobody logged in."""
    repos = {
        BASE: HubRepo(base_files()),
        HEADS: HubRepo(heads_files()),
        WHOLE: HubRepo(whole_files()),
    }
    with serving(repos) as running:
        use(running, monkeypatch, tmp_path)
        yield running


def use(running: Hub, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let huggingface_hub, imported already, speak to this server and keep its cache here."""
    from huggingface_hub import close_session, constants

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", running.url)
    template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 60)  # a busy machine is no fault
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 60)
    monkeypatch.setattr(download, "CONNECT_SECONDS", 60.0)
    close_session()
