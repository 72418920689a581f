"""Model cards are checked when they are read."""

import json
from dataclasses import replace

import pytest

from chorus_batch.jobs.cards.card import CARDS, NO_GAIN, load_card
from chorus_batch.jobs.errors import SettingsError
from chorus_batch.jobs.ingest.tokens import tokenizer_path

CARD = load_card("builtin")
GAINS = {"key": 2.0, "output": 1.0, "until": 0.8}
REGIONS = {"edit_spatial": 1, "edit_temporal": 1, "see_spatial": 2, "see_temporal": 1, "largest_share": 0.7}
KINDS = {"attribute": {"20": [[0.7, 8, 12], [0.9, 12, 12]]}, "motion": {"4": [], "20": [[0.9, 2, 2]]}}


def test_the_builtin_card_says_what_the_model_makes():
    assert (CARD.defaults.width, CARD.defaults.height, CARD.defaults.frames, CARD.defaults.fps) == (128, 128, 9, 8)
    assert CARD.allowed_sizes == ((64, 64), (128, 128)) and CARD.allowed_frames == (9,)
    assert CARD.defaults.scheduler in CARD.schedulers
    assert CARD.tau == min(rows[0][0] for rows in CARD.boundaries.values()) and 0.5 < CARD.tau < 1
    assert CARD.defaults.steps in CARD.boundaries
    assert tokenizer_path(CARD.tokenizer).name == "tokenizer.json"


def test_an_unknown_model_is_named_with_the_known_ones():
    with pytest.raises(SettingsError, match="wan") as caught:
        load_card("wan")
    assert "builtin" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "abc"}, "fingerprint"),
        ({"boundaries": {"20": [[0.8, 6, 6], [0.75, 8, 8]]}}, "ascend"),
        ({"boundaries": {"20": [[0.8, 6, 6], [0.9, 5, 8]]}}, "ascend"),
        ({"boundaries": {"4": [[0.8, 3, 6]]}}, "k1 <= k2 <= steps"),
        ({"boundaries": {"4": [[0.8, 3, 2]]}}, "k1 <= k2 <= steps"),
        ({"boundaries": {"4": []}}, "empty"),
        ({"allowed_sizes": [[64, 65]]}, "multiple"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens"),
        ({"boundaries": {"4": [[0.8, 1.5, 2]]}}, "1.5"),
        ({"boundaries": [[0.8, 1, 2]]}, "not a model card"),
        ({"kinds": {"motion": {"20": [[0.8, 6, 6], [0.75, 8, 8]]}}}, "kinds: 'motion' for 20 steps.*ascend"),
        ({"kinds": {"motion": {"20": [[0.8, 6, 21]]}}}, "kinds: 'motion' for 20 steps.*k1 <= k2 <= steps"),
        ({"kinds": {"motion": {}}}, "kinds: 'motion' has no table"),
        ({"kinds": {"motion": [[0.8, 6, 6]]}}, "not a model card"),
        ({"gains": {"key": 2.0, "output": 1.0}}, "gains are key, output, until, not key, output"),
        ({"gains": GAINS | {"values": 2.0}}, "gains are key, output, until"),
        ({"gains": GAINS | {"key": 0.5}}, "gains: key must be 1"),
        ({"gains": GAINS | {"output": float("inf")}}, "gains: output must be 1"),
        ({"gains": GAINS | {"key": float("nan")}}, "gains: key must be 1"),
        ({"gains": GAINS | {"key": "two"}}, "not a model card"),
        ({"gains": GAINS | {"until": 0.0}}, "gains: until"),
        ({"gains": GAINS | {"until": 1.5}}, "gains: until"),
        ({"kind_gains": {"motion": GAINS | {"key": 0.5}}}, "gains of kind 'motion': key must be 1"),
        ({"kind_gains": {"motion": {"key": 2.0}}}, "gains of kind 'motion' are key, output, until"),
        ({"regions": {"edit_spatial": 1}}, "regions are edit_spatial.*largest_share, not edit_spatial"),
        ({"regions": REGIONS | {"see": 1}}, "regions are"),
        ({"regions": REGIONS | {"edit_spatial": -1}}, "regions: edit_spatial is a whole number"),
        ({"regions": REGIONS | {"see_temporal": 1.5}}, "regions: see_temporal is a whole number"),
        ({"regions": REGIONS | {"see_spatial": float("inf")}}, "regions: see_spatial is a whole number"),
        ({"regions": REGIONS | {"see_spatial": 1}}, "see_spatial must exceed"),
        ({"regions": REGIONS | {"see_temporal": 0}}, "see_temporal must not be below"),
        ({"regions": REGIONS | {"largest_share": 0}}, "largest_share"),
        ({"regions": REGIONS | {"largest_share": 1.1}}, "largest_share"),
        ({"colour": "red"}, "colour"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"weights": {"folder": "x", "colour": "red"}}, "not a model card"),
        ({"weights": {"lora": "x"}}, "not a model card"),
        ({"defaults": {"width": 64}}, "missing"),
    ],
)
def test_a_wrong_card_is_refused(tmp_path, change, message):
    table = json.loads((CARDS / "builtin.json").read_text()) | change
    path = tmp_path / "card.json"
    path.write_text(json.dumps(table))
    with pytest.raises(SettingsError, match=message):
        load_card(str(path))


def test_a_card_can_be_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text((CARDS / "builtin.json").read_text().replace('"builtin"', '"mine"', 1))
    assert load_card(str(path)).defaults.model == "mine"
    with pytest.raises(SettingsError, match="No such file"):
        load_card(str(tmp_path / "none.json"))


def test_a_card_without_boundaries_never_reuses():
    assert replace(CARD, boundaries={}, kinds={}).tau > 1


def test_a_card_without_kinds_gains_and_regions_has_none(tmp_path):
    table = json.loads((CARDS / "builtin.json").read_text())
    path = tmp_path / "card.json"
    path.write_text(json.dumps({name: table[name] for name in table if name not in ("kinds", "gains", "regions")}))
    card = load_card(str(path))
    assert (card.kinds, card.regions) == ({}, {})
    assert card.gains == {"key": 1.0, "output": 1.0, "until": 1.0}


def test_kinds_gains_and_regions_are_read_as_they_stand(tmp_path):
    table = json.loads((CARDS / "builtin.json").read_text())
    path = tmp_path / "card.json"
    path.write_text(json.dumps(table | {"kinds": KINDS, "gains": GAINS, "regions": REGIONS | {"see_spatial": 2.0}}))
    card = load_card(str(path))
    assert card.kinds == {
        "attribute": {20: ((0.7, 8, 12), (0.9, 12, 12))},
        "motion": {4: (), 20: ((0.9, 2, 2),)},
    }
    assert (card.gains, card.regions) == (GAINS, REGIONS)
    assert isinstance(card.regions["see_spatial"], int)


def test_a_kind_can_lower_tau_and_an_empty_table_cannot():
    rows = {20: ((0.8, 6, 6),)}
    assert replace(CARD, boundaries=rows, kinds={"motion": {20: ()}}).tau == 0.8
    assert replace(CARD, boundaries=rows, kinds={"attribute": {20: ((0.7, 8, 8),)}}).tau == 0.7
    assert replace(CARD, boundaries=rows, kinds={"motion": {20: ((0.9, 2, 2),)}}).tau == 0.8
    assert replace(CARD, boundaries={}, kinds={"motion": {20: ()}}).tau > 1


def test_the_engine_takes_what_a_card_names():
    """The card can't import the engine; so here each name and figure goes where the worker takes it."""
    from chorus_batch.chorus.gains import NO_GAINS, Gains
    from chorus_batch.chorus.regions import RegionSettings
    from chorus_batch.chorus.stages import Boundaries

    card = replace(CARD, kinds={"motion": {4: ()}}, gains=GAINS, regions=REGIONS)
    assert Gains(**card.gains, tau=0.7) == Gains(key=2.0, output=1.0, until=0.8, tau=0.7)
    assert Gains(**replace(CARD, gains=dict(NO_GAIN)).gains, tau=NO_GAINS.tau) == NO_GAINS
    assert RegionSettings(**card.regions) == RegionSettings(1, 1, 2, 1, 0.7)
    assert Boundaries.parse(card.boundaries, 3.0, card.kinds).tau == card.tau
