"""What the planner reads from a model card, and what it tells."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from chorus_batch.jobs import reuse
from chorus_batch.jobs.cards.card import ModelCard, load_card
from chorus_batch.jobs.costs import BUILTIN, UNKNOWN
from chorus_batch.jobs.curve import Price
from chorus_batch.jobs.parameters import Parameters
from chorus_batch.jobs.plan import GraphReport, unshared
from chorus_batch.jobs.weights import Weights

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
    domain = reuse.domain_of(CARD, CARD.defaults, 0.0, Price())
    first, k1, _ = CARD.boundaries[20][0]
    assert (domain.tau, domain.kinds, domain.semantic) == (first, (), True)
    assert domain.curve(np.array([first]))[0] == pytest.approx(1 - k1 / 20)
    assert reuse.domain_of(CARD, CARD.defaults, 0.95, Price()).tau == 0.95
    assert not reuse.domain_of(CARD, replace(CARD.defaults, policy="none"), 0.0, Price()).semantic


def test_kinds_have_tables_of_their_own_unless_the_policy_knows_none() -> None:
    card, parameters = with_kinds()
    domain = reuse.domain_of(card, parameters, 0.0, Price())
    assert reuse.known_kinds(card, parameters) == ["attribute", "background"]
    attribute, background = domain.kinds
    assert background is None and attribute is not None and attribute.tau == domain.lowest == 0.6
    assert reuse.domain_of(card, parameters, 0.7, Price()).lowest == 0.7
    card, parameters = with_kinds("nirvana")
    assert reuse.domain_of(card, parameters, 0.0, Price()).kinds == ()


def test_templates_are_told_where_they_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "kinds", lambda pairs, synonyms: ["attribute"] * len(pairs))
    card, parameters = with_kinds()
    vectors = np.eye(len(PROMPTS), dtype=np.float32) + 1.0
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    slots, notes = reuse.slots_of(card, PROMPTS, vectors, [parameters], PROMPTS[:2])
    assert slots is not None and len(slots.template) == len(PROMPTS) + 2 and len(notes) == 1
    assert "25 prompts" in notes[0].message and "{attribute}" in notes[0].message
    assert "more similar" not in notes[0].message  # all kinds are known
    assert reuse.slots_of(card, PROMPTS[:5], vectors[:5], [parameters]) == (None, ())


def test_without_kinds_a_template_asks_for_more_than_its_boilerplate() -> None:
    card, parameters = with_kinds("nirvana")
    vectors = np.eye(len(PROMPTS), dtype=np.float32) + 1.0
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    slots, notes = reuse.slots_of(card, PROMPTS, vectors, [parameters])
    assert slots is not None and slots.alike == pytest.approx([27 / 28])
    assert "more similar than 0.96" in notes[0].message and "{?}" in notes[0].message


def test_what_was_measured_prices_a_follower() -> None:
    assert reuse.price_of(UNKNOWN) == Price(UNKNOWN.region_share.expected)
    price = reuse.price_of(BUILTIN)
    step = 192 * 1.6e-4
    assert (price.region, price.beside, price.beside_reuse) == pytest.approx((0.5, 0.04 / step, 0.05 / step))


def test_thresholds_of_another_embedder_are_told() -> None:
    added = replace(CARD, name="wan14", weights=Weights("/models/wan"))
    assert reuse.embedder_notes(CARD, "minilm") == reuse.embedder_notes(added, "clip:/models/clip") == ()
    (note,) = reuse.embedder_notes(added, "minilm")
    assert "wan14 are for similarities of CLIP, not of minilm" in note.message


def test_recall_is_logged_and_stored(caplog: pytest.LogCaptureFixture) -> None:
    planned = replace(
        unshared(np.arange(3), link=True), graphs=(GraphReport(0, 2, 1, 5, 0.97), GraphReport(1, 1, 0, 0, None))
    )
    with caplog.at_level(logging.INFO):
        assert reuse.reported(planned) == {"recall": 0.97, "pairs": 5, "entries": 1}
    assert "nearest neighbors found 0.970" in caplog.text
    assert reuse.reported(unshared(np.arange(3), link=True))["recall"] is None
