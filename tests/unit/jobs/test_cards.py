"""Model cards are checked when they are read."""

import json
from dataclasses import replace

import pytest

from chorus_batch.jobs.cards.card import CARDS, load_card
from chorus_batch.jobs.errors import SettingsError
from chorus_batch.jobs.ingest.tokens import tokenizer_path

CARD = load_card("builtin")


def test_the_builtin_card_says_what_the_model_makes():
    assert (CARD.defaults.width, CARD.defaults.height, CARD.defaults.frames, CARD.defaults.fps) == (64, 64, 9, 8)
    assert CARD.allowed_sizes == ((64, 64),) and CARD.allowed_frames == (9,)
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
        ({"colour": "red"}, "colour"),
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
    assert replace(CARD, boundaries={}).tau > 1
