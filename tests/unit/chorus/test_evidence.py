"""Attention maps of words, and the regions that segmenters read from them."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chorus_batch.chorus.differ import Difference, Kind, Scope
from chorus_batch.chorus.evidence import Evidence, Recorder, Word, content_words, recorded_layers, recorded_steps
from chorus_batch.chorus.schedule import noise_levels
from chorus_batch.chorus.segment import EvidenceSegmenter, Source, threshold

GRID = (1, 2, 3)


def query_and_key(seed: int, tokens: int = 6, slots: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, tokens, 2, 4, generator=generator), torch.randn(1, slots, 2, 4, generator=generator)


def shares(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[slots, tokens], summed over heads: the definition of attention, all heads at once."""
    return (torch.einsum("bnhd,bshd->bhns", query, key) / 2.0).softmax(-1).sum((0, 1)).T


def scaled(map_: torch.Tensor) -> torch.Tensor:
    return (map_ - map_.min()) / (map_.max() - map_.min())


def test_maps_are_sums_over_layers_heads_and_steps() -> None:
    recorder = Recorder([Word((0, 3), (1, 2)), Word((4, 6), (3,))], frozenset({1, 2}), frozenset({4, 5}))
    expected = torch.zeros(5, 6)
    for step in range(7):
        watch = recorder.at(step)
        assert (watch is not None) == (step in (4, 5))
        for layer in range(4):
            query, key = query_and_key(10 * step + layer)
            if watch is not None:
                watch(layer, query, key)
                if layer in (1, 2):
                    expected += shares(query, key)
    found = recorder.evidence(GRID)
    assert found is not None
    assert found.spans == ((0, 3), (4, 6))
    for map_, words in zip(found.maps, (expected[1:3].mean(0), expected[3]), strict=True):
        assert (map_.flatten().float() / 255 - scaled(words)).abs().max() <= 0.5 / 255 + 1e-5


def test_nothing_is_watched_without_words_and_nothing_comes_of_it() -> None:
    recorder = Recorder([Word((0, 3), ())], frozenset({0}), frozenset({0}))
    assert recorder.at(0) is None
    assert recorder.evidence(GRID) is None


def test_evidence_is_looked_up_by_overlapping_characters() -> None:
    maps = torch.tensor([0, 255, 51], dtype=torch.uint8)[:, None, None, None].expand(3, *GRID)
    evidence = Evidence(((2, 5), (6, 12), (20, 25)), maps)
    for spans, expected in [(((6, 12),), 1.0), (((2, 12),), 0.5), (((24, 30),), 0.2), (((3, 4), (22, 23)), 0.1)]:
        found = evidence.of(spans)
        assert found is not None
        assert torch.allclose(found, torch.full(GRID, expected))
    for nothing in ((), ((0, 2),), ((12, 20),), ((25, 30),)):
        assert evidence.of(nothing) is None


@pytest.mark.parametrize("steps", [1, 4, 20, 50])
def test_some_steps_and_layers_are_always_recorded(steps: int) -> None:
    found = recorded_steps(noise_levels(steps, 3.0))
    assert found
    assert found <= set(range(steps))
    assert all(b - a == 1 for a, b in pairwise(sorted(found)))
    for layers in (1, 2, 3, 5, 30, 40):
        assert recorded_layers(layers)
        assert recorded_layers(layers) <= set(range(layers))


@pytest.mark.parametrize("girls", ["girl's", "girl\u2019s"])
def test_content_words_are_those_that_name_something(girls: str) -> None:
    prompt = f"The red-haired {girls} kite, over a black background"
    assert [prompt[a:b] for a, b in content_words(prompt)] == ["red-haired", girls, "kite", "black", "background"]


@given(st.text(max_size=60))
def test_content_words_lie_in_the_prompt_in_order(prompt: str) -> None:
    spans = content_words(prompt)
    assert all(0 <= a < b <= len(prompt) for a, b in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_the_threshold_parts_two_heaps() -> None:
    generator = torch.Generator().manual_seed(1)
    low, high = torch.rand(900, generator=generator) * 0.3, 0.7 + torch.rand(100, generator=generator) * 0.3
    assert 0.3 <= threshold(torch.cat([low, high])) <= 0.7


DIFFERENCE = Difference(Kind.attribute, Scope.object, "red circle", "blue circle", ((2, 12),), ((2, 6),))


def two_heaps() -> Evidence:
    map_ = torch.tensor([[[10, 20, 250], [0, 240, 15]]], dtype=torch.uint8)
    return Evidence(((2, 5), (6, 12), (30, 35)), torch.stack([map_, map_, 255 - map_]))


def test_a_region_is_where_the_words_were_drawn() -> None:
    object_region = torch.tensor([[[False, False, True], [False, True, False]]])
    source = Source("a red circle moves left over a black background", two_heaps())
    found = EvidenceSegmenter().region(source, DIFFERENCE)
    assert found is not None
    assert torch.equal(found, object_region)
    background = Difference(Kind.background, Scope.background, "red circle", "pink", ((2, 12),), ((31, 35),))
    complement = EvidenceSegmenter().region(source, background)
    assert complement is not None
    assert torch.equal(complement, ~object_region)


def test_what_cant_be_told_has_no_region() -> None:
    segmenter, source = EvidenceSegmenter(), Source("a red circle", two_heaps())
    moving = Difference(Kind.motion, Scope.everything, "red circle", "right", ((2, 12),), ((19, 24),))
    assert segmenter.region(source, moving) is None
    assert segmenter.region(Source("a red circle", None), DIFFERENCE) is None
    added = Difference(Kind.object, Scope.object, "", "star", (), ((2, 6),))
    assert segmenter.region(source, added) is None
