"""What finished jobs tell of costs, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chorus_batch.jobs.cards.card import load_card
from chorus_batch.jobs.costs import UNKNOWN, Made, Range, fitted, shipped
from chorus_batch.jobs.weights import Weights

CARD = load_card("builtin")
PARAMETERS = replace(CARD.defaults, width=64, height=64)  # 9 frames, 20 steps, guided
MISS = Made(64, 64, 9, True, "none", "miss", 0, 0, 20, 4000, 4000, 2.0, 2.5, 3.0, 1000, 500)
HIT = replace(MISS, result="semantic", k1=8, k2=10, tokens_computed=2200, denoise=1.1, held=1.5, seconds=2.0)
LINK = replace(MISS, result="exact", tokens_computed=0, denoise=0.0, held=0.1, seconds=0.2)


def test_quartiles_of_a_sample() -> None:
    assert Range.of_sample([4, 1, 3, 2, 5]) == Range(2, 3, 4)
    assert Range.of_sample([]) is None


def test_measured_at_the_same_size() -> None:
    found = fitted(PARAMETERS, [MISS, MISS, HIT, LINK], [100, 200, 300])
    assert found.traces == 3 and found.tokens_per_step == 200
    assert found.seconds_per_token is not None and found.seconds_per_token.expected == pytest.approx(0.0005)
    assert found.beside["miss"].expected == pytest.approx(1.0) and found.held["miss"].expected == pytest.approx(0.5)
    assert found.beside["semantic"].expected == pytest.approx(0.9)
    assert found.held["semantic"].expected == pytest.approx(0.4)
    assert found.beside["exact"].expected == pytest.approx(0.2)
    # Steps 10 to 20 in full are 2000 tokens; steps 8 and 9 shared 200 of 400.
    assert found.region_share.expected == pytest.approx(0.5)
    assert found.video_bytes is not None and found.video_bytes.expected == 1000
    assert found.entry_step_bytes is not None and found.entry_step_bytes.expected == 200


def test_guidance_is_a_second_branch() -> None:
    assert fitted(replace(PARAMETERS, guidance_scale=1.0), [MISS] * 3).tokens_per_step == 100
    plain = replace(MISS, guided=False, tokens_total=2000, tokens_computed=2000, denoise=1.0)
    assert fitted(PARAMETERS, [plain] * 3).tokens_per_step == 200


def test_a_step_cache_computes_less_of_every_step() -> None:
    cached = replace(MISS, step_cache="teacache", tokens_computed=3000)
    found = fitted(replace(PARAMETERS, step_cache="teacache"), [cached] * 3 + [MISS] * 9)
    assert found.traces == 3 and found.step_share == 0.75


def test_what_was_never_seen_is_stood_in_for() -> None:
    found = fitted(PARAMETERS, [MISS] * 3)
    assert found.beside["semantic"] == found.beside["miss"]
    assert (found.beside["exact"].low, found.beside["exact"].expected) == (0, 0)
    hits = fitted(PARAMETERS, [HIT] * 3)
    assert hits.beside["miss"] == hits.beside["semantic"] and hits.step_share == 1.0


def test_other_sizes_tell_seconds_but_no_bytes() -> None:
    found = fitted(replace(PARAMETERS, width=128), [MISS] * 3)
    assert found.tokens_per_step == 400 and found.video_bytes is None
    rate = found.seconds_per_token
    assert rate is not None and (rate.low, rate.expected, rate.high) == pytest.approx((0.0005, 0.0005, 0.001))
    assert "other sizes" in found.basis


def test_a_few_traces_say_nothing() -> None:
    assert fitted(PARAMETERS, [MISS, HIT, LINK, LINK, LINK]) is UNKNOWN


def test_only_the_built_in_model_ships_with_costs() -> None:
    ours = shipped(CARD, PARAMETERS)
    assert ours.seconds_per_token is not None and "shipped" in ours.basis
    assert shipped(CARD, replace(PARAMETERS, guidance_scale=1.0)).tokens_per_step == (ours.tokens_per_step or 0) / 2
    assert shipped(replace(CARD, weights=Weights("somewhere")), PARAMETERS) is UNKNOWN


def test_shipped_costs_follow_the_size_of_the_video() -> None:
    small, large = (shipped(CARD, replace(PARAMETERS, width=side, height=side)) for side in (64, 128))
    assert (small.tokens_per_step, large.tokens_per_step) == (2 * 192, 2 * 768)
    assert small.latents_bytes is not None and large.latents_bytes is not None
    assert large.latents_bytes.expected == 4 * small.latents_bytes.expected
