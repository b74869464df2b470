"""The backbone of a training: brought here first where it is on the Hub."""

from pathlib import Path

import pytest
from support.hub_server import Hub, HubRepo
from support.training_models import write_backbone

from medusa_chat.errors import ModelError
from medusa_chat.training.events import Stage
from medusa_chat.training.process_group import ProcessGroup
from medusa_chat.training.recipe import Recipe, TrainRequest
from medusa_chat.training.setup import TrainingSetup, prepare_setup

BACKBONE = "someone/tiny"


def setup_of(**options: bool) -> tuple[list[Stage], TrainingSetup]:
    request = TrainRequest(BACKBONE, (), Path("heads"), Recipe(), "fp32", "cpu", **options)
    steps, stages = prepare_setup(request, ProcessGroup()), []
    while True:
        try:
            stages.append(next(steps))
        except StopIteration as end:
            return stages, end.value


def test_a_backbone_on_the_hub_is_downloaded_once_and_said(server: Hub, tmp_path: Path) -> None:
    write_backbone(tmp_path / "made")
    files = {file.name: file.read_bytes() for file in (tmp_path / "made").iterdir()}
    server.repos[BACKBONE] = HubRepo(files)
    with pytest.raises(ModelError, match="not in the cache"):
        setup_of(offline=True)
    stages, setup = setup_of()
    assert stages == [Stage("downloading the model")] and setup.vocabulary > 0
    before = len(server.requests)
    assert setup_of()[0] == [] and len(server.requests) == before
