"""Heads to spoil, a folder to lay them in, and the line that refuses them."""

import pytest

from medusa_chat.checkpoints.head_weights import read_heads
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.weights import read_config
from medusa_chat.errors import ModelError
from medusa_chat.messages import LoadRequest
from support.checkpoints import (
    heads_folder,
    layered,
    with_bias,
    write_checkpoint,
)

REMEDIES = ("download", "give", "use ", "take", "ask", "are allowed", "run git", "leave")
SAFE, PICKLED = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
W = "0.0.linear.weight"
GOOD = with_bias(layered())


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("gate") / "backbone", heads=0)


@pytest.fixture
def lone_heads(backbone, tmp_path):
    """For heads alone; the backbone that they name is whole."""
    return heads_folder(tmp_path / "heads", base_model_name_or_path=str(backbone))


def refusal(folder):
    """The one line with which these heads are refused before the backbone is read."""
    with pytest.raises(ModelError) as caught:
        found = Checkpoint.find(LoadRequest(str(folder)))
        read_heads(found, read_config(found.backbone))
    return str(caught.value)


def require(line, file, says):
    """One line, the file's name in it, why, and what to do."""
    assert says in line and file in line, line
    assert "\n" not in line and len(line) < 600
    assert any(remedy in line for remedy in REMEDIES), line


def spoiled(value):
    broken = {name: tensor.clone() for name, tensor in GOOD.items()}
    broken["1.0.linear.weight"][3, 5] = value
    return broken
