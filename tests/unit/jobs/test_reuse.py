"""What the planner reads from a model card, and what it tells."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from chorus_batch.jobs import reuse
from chorus_batch.jobs.cards.card import ModelCard, load_card
from chorus_batch.jobs.parameters import Parameters
from chorus_batch.jobs.plan import GraphReport, unshared

CARD = replace(load_card("builtin"), kinds={})
PROMPTS = [
    f"Product video of a {color} ceramic mug, slow camera turn {place}, photorealistic."
    for color in ("red", "blue", "green", "black", "pink")
    for place in ("on a beach", "in a studio", "in the snow", "at night", "in a forest")
]


def with_kinds(policy: str = "chorus") -> tuple[ModelCard, Parameters]:
    rows = {20: ((0.6, 10, 10),)}
    card = replace(CARD, kinds={"background": {20: ()}, "attribute": rows})
    return card, replace(CARD.defaults, policy=policy)


def test_general_table_and_threshold() -> None:
    domain = reuse.domain_of(CARD, CARD.defaults, 0.0)
    first, k1, _ = CARD.boundaries[20][0]
    assert (domain.tau, domain.kinds, domain.semantic) == (first, (), True)
    assert domain.curve(np.array([first]))[0] == pytest.approx(1 - k1 / 20)
    assert reuse.domain_of(CARD, CARD.defaults, 0.95).tau == 0.95
    assert not reuse.domain_of(CARD, replace(CARD.defaults, policy="none"), 0.0).semantic


def test_kinds_have_tables_of_their_own_unless_the_policy_knows_none() -> None:
    card, parameters = with_kinds()
    domain = reuse.domain_of(card, parameters, 0.0)
    assert reuse.known_kinds(card, parameters) == ["attribute", "background"]
    attribute, background = domain.kinds
    assert background is None and attribute is not None and attribute.tau == domain.lowest == 0.6
    assert reuse.domain_of(card, parameters, 0.7).lowest == 0.7
    card, parameters = with_kinds("nirvana")
    assert reuse.domain_of(card, parameters, 0.0).kinds == ()


def test_templates_are_told_where_they_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "kinds", lambda pairs, synonyms: ["attribute"] * len(pairs))
    card, parameters = with_kinds()
    slots, notes = reuse.slots_of(card, PROMPTS, [parameters])
    assert slots is not None and len(notes) == 1
    assert "25 prompts" in str(notes[0]) and "{attribute}" in str(notes[0])
    rows = reuse.of_prompts(slots, np.array([3, 3]))
    assert rows is not None and len(rows.template) == 2
    assert reuse.slots_of(CARD, PROMPTS, [CARD.defaults]) == (None, ())
    assert reuse.of_prompts(None, np.array([0])) is None


def test_recall_is_logged_and_stored(caplog: pytest.LogCaptureFixture) -> None:
    planned = replace(
        unshared(np.arange(3), link=True), graphs=(GraphReport(0, 2, 1, 5, 0.97), GraphReport(1, 1, 0, 0, None))
    )
    with caplog.at_level(logging.INFO):
        assert reuse.reported(planned) == {"recall": 0.97, "pairs": 5, "entries": 1}
    assert "nearest neighbors found 0.970" in caplog.text
    assert reuse.reported(unshared(np.arange(3), link=True))["recall"] is None
