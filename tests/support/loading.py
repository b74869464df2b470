"""Checkpoints loaded and asked in this process."""

import shutil

import pytest

from medusa_chat.checkpoints.load import load
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.reply import reply
from medusa_chat.runtime.requests import Reply
from support.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture
def folder(whole, tmp_path):
    """A copy that a test may break."""
    return shutil.copytree(whole, tmp_path / "model")


def loaded(folder, **options):
    phases = list(load(LoadRequest(str(folder), **({"precision": "fp32"} | options))))
    names = [phase.name for phase, _ in phases if phase.name != "quantise"]
    assert names == ["resolve", "read", "check", "warm up", "ready"]
    return phases[-1][1]


def answer(model, prompt="hello", **settings):
    chosen = GenerationSettings(**{"max_new_tokens": 20, "seed": 3} | settings)
    return list(reply(model, Reply(prompt, chosen)))
