"""The engine's differ, asked in a process."""

from __future__ import annotations

import sys

import pytest

from chorus_batch.jobs import kinds
from chorus_batch.jobs.cards.card import load_card

RED = "a red circle moves right over a black background"
BLUE = "a blue circle moves right over a black background"
SQUARE = "a blue square moves right over a black background"


def test_kinds_are_the_differs() -> None:
    differ = pytest.importorskip("chorus_batch.chorus.differ").LexicalDiffer()
    pairs = [(RED, BLUE), (RED, SQUARE), (RED, RED), ("ein Bär, größer\n als 'ich'", RED)]
    found = kinds.parts(pairs)
    for pair, each in zip(pairs, found, strict=True):
        difference = differ.compare(*pair)
        assert each == tuple(dict.fromkeys([difference.kind.value, *(kind.value for kind, _ in difference.parts)]))
    assert found[0] == ("attribute",) and found[1][0] == "several" and set(found[1][1:]) == {"attribute", "object"}
    assert kinds.kinds(pairs) == [each[0] for each in found]


def test_the_models_synonyms_count() -> None:
    pairs = [("a red circle moves right", "a red ball moves right")]
    assert kinds.kinds(pairs) == ["object"]
    assert kinds.parts(pairs, load_card("builtin").synonyms) == [("attribute",)]  # nothing differs


def test_of_many_pairs_a_sample_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "ASKED", 4)
    found = kinds.parts([(RED, BLUE)] * 50)
    assert found == [("attribute",)] * 50


def test_without_the_engine_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kinds.parts([]) == []
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert kinds.parts([(RED, BLUE)] * 2) == [(), ()] and kinds.kinds([(RED, BLUE)]) == [None]
