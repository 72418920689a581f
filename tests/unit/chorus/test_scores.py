"""The model card's scores against the shipped weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chorus_batch.chorus.tiny import scores
from chorus_batch.chorus.tiny.model import model_names
from chorus_batch.chorus.tiny.scores import SCORES, Case, measure, read_cases

FEW = 16
CASES = read_cases(SCORES)


@pytest.mark.parametrize("case", [c for c in CASES if c.count <= FEW], ids=lambda c: f"{c.model}-{c.canvas}-{c.suite}")
def test_the_shipped_weights_reach_the_recorded_scores(case: Case) -> None:
    measured = measure(case)
    assert measured.keys() == case.shares.keys()
    for name, share in measured.items():
        # One video in sixteen may fall on the other side of a threshold by its last bits.
        assert share == pytest.approx(case.shares[name], abs=1 / case.count + 1e-3), name


def test_every_shipped_model_has_scores_of_many_videos_and_a_quick_case() -> None:
    for name in model_names():
        counts = [c.count for c in CASES if c.model == name]
        assert min(counts) <= FEW
        assert max(counts) >= 200


def test_scores_are_recorded_only_when_asked(tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    case = {"model": "builtin", "suite": "world", "count": 1, "canvas": 64, "steps": 1}
    case |= {"guidance": 1.0, "shift": 3.0, "seed": 1, "shares": {}}
    file.write_text(json.dumps([case, case | {"count": 9}]), "utf-8")
    scores.main(["--most", "1", "--file", str(file)])
    assert read_cases(file)[0].shares == {}
    scores.main(["--most", "1", "--write", "--file", str(file)])
    few, many = read_cases(file)
    assert 0 <= few.shares["all"] <= 1 and many.shares == {}
