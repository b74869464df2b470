"""A small checkpoint for the studies, and what they say of it. No figure here is a measurement."""

import pytest
from support.checkpoints import write_checkpoint

from medusa_chat.bench import run
from medusa_chat.bench.context import BenchContext, read_model
from medusa_chat.messages import LoadRequest


def quiet(message):
    pass


@pytest.fixture(scope="session")
def request_of(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("studies") / "model", heads=5)
    return LoadRequest(str(folder), device="cpu", precision="fp32")


@pytest.fixture(scope="module")
def context(request_of):
    """Two rounds of answers of 6 tokens."""
    return BenchContext(request_of, read_model(request_of, quiet), "auto", 2, 6, quiet, 0.0)


@pytest.fixture(scope="session")
def study(request_of):
    """A function that runs one study: its rows by their names."""

    def rows_of(name, request=request_of, **options):
        usual = {"rounds": 1, "max_new_tokens": 8, "tree": "auto", "budget": 0.0}
        rows = run(request, studies=[name], progress=quiet, **(usual | options))["rows"]
        return {row["name"]: row for row in rows}

    return rows_of
