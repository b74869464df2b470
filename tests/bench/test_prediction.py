"""The study "tuner" sets each part of a prediction beside its measurement."""

import pytest

from medusa_chat.bench import run
from medusa_chat.bench.studies.prediction import CALIBRATED, COUNTED


def test_each_part_of_a_prediction_stands_beside_its_measurement(request_of):
    options = {"rounds": 1, "max_new_tokens": 8, "tree": "auto", "progress": lambda message: None}
    rows = run(request_of, studies=["tuner"], budget=0.0, **options)["rows"]
    named = {(row["name"], row["against"]): row for row in rows}
    assert ("plain decoding: step", "the tuner's") in named
    for nodes in (4, 8, 16):
        for part in ("step", "overhead"):
            assert named[f"{nodes} nodes: {part}", "the tuner's"]["ratio"] > 0
        overhead = named[f"{nodes} nodes: overhead", "the tuner's"]
        for by in (CALIBRATED, COUNTED):
            tokens = named[f"{nodes} nodes: tokens a step", by]
            speedup = named[f"{nodes} nodes: speedup", f"predicted by {by}"]
            assert 1 <= tokens["value"] <= 6
            # the two errors of a prediction multiply to that of the speedup
            both = tokens["ratio"] / overhead["ratio"]
            assert speedup["ratio"] == pytest.approx(both, rel=1e-6)
