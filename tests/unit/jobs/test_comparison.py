"""Batches side by side: figures counted by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus_batch.jobs.comparison import Batch, Figures, Made, compare
from chorus_batch.jobs.errors import UsageError

BOTH = {"colour": True, "shape": True}
COLOUR = {"colour": True, "shape": False}
PLAIN = Made(b"", 1, 8, "none", "none", "miss", 100, 10.0, BOTH)


def job(prompt: str, result: str | None = "miss", tokens: int = 100, seconds: float = 10.0, **changes: object) -> Made:
    values: dict[str, object] = {"cache_result": result, "tokens": tokens, "denoise_seconds": seconds}
    return replace(PLAIN, prompt_key=prompt.encode(), **{**values, **changes})  # type: ignore[arg-type]


def against(baseline: list[Made], own: list[Made]) -> Figures:
    """The figures of the second of two batches."""
    first, second = compare([Batch(1, "one", baseline), Batch(2, "two", own)])
    assert (first.batch_id, first.speedup, first.tokens_share) == (1, 1.0, 1.0)
    assert first.matched == second.matched
    return second


def test_everything_counted_by_hand() -> None:
    baseline = [job("a"), job("b"), job("c", scores=COLOUR), job("d")]
    own = [
        job("d", "semantic", 50, 5.0, policy="chorus"),
        job("c", "semantic", 60, 6.0, policy="chorus"),  # mended
        job("b", "semantic", 40, 4.0, policy="chorus", scores=COLOUR),  # spoiled
        job("a", policy="chorus"),
    ]
    assert against(baseline, own) == Figures(
        batch_id=2,
        batch="two",
        policies=("chorus",),
        step_caches=("none",),
        jobs=4,
        matched=4,
        hits=3,
        semantic_hits=3,
        exact_hits=0,
        hit_rate=0.75,
        tokens=250,
        tokens_share=0.625,
        denoise_seconds=25.0,
        speedup=1.6,
        speedup_hits=2.0,
        scored=4,
        accuracy=0.75,
        accuracy_hits=2 / 3,
        baseline_accuracy_hits=2 / 3,
        spoiled=1 / 3,
        mended=1 / 3,
        attributes={"colour": 1.0, "shape": 0.75},
        attributes_hits={"colour": 1.0, "shape": 2 / 3},
    )


def test_links_are_hits_but_say_nothing_of_reuse() -> None:
    """An exact hit costs nothing: among the hits it would make any reuse look fast."""
    baseline = [job("a"), job("b"), job("b", "exact", 0, 0.0)]
    own = [job("a", "semantic", 50, 5.0, scores=COLOUR), job("b"), job("b", "exact", 0, 0.0)]
    found = against(baseline, own)
    assert (found.hits, found.semantic_hits, found.exact_hits, found.hit_rate) == (2, 1, 1, 2 / 3)
    assert (found.speedup, found.speedup_hits) == (20 / 15, 2.0)
    assert (found.accuracy, found.accuracy_hits, found.spoiled) == (2 / 3, 0.0, 1.0)


def test_jobs_match_by_prompt_seed_and_frame_rate() -> None:
    baseline = [job("a"), job("b"), job("c"), job("d", seed=2, fps=16)]
    own = [job("a", seed=2), job("b", fps=16), job("d", seed=2, fps=16, tokens=7), job("e"), job("c", tokens=3)]
    found = against(baseline, own)
    assert (found.matched, found.jobs, found.tokens, found.tokens_share) == (2, 5, 10, 0.05)


def test_copies_match_in_their_order_whatever_became_of_them() -> None:
    baseline = [job("a", tokens=1), job("a", None, 0), job("a", tokens=4)]
    own = [job("a", None, 0), job("a", tokens=20), job("a", tokens=40)]
    found = against(baseline, own)
    assert (found.matched, found.tokens, found.tokens_share) == (1, 40, 10.0)


def test_every_figure_is_over_the_jobs_that_all_batches_finished() -> None:
    one = [job("a", tokens=1), job("b", tokens=2), job("c", tokens=4)]
    two = [job("a", tokens=10), job("b", tokens=20)]
    three = [job("b", tokens=200), job("c", tokens=400), job("a", None, 0)]
    found = compare([Batch(n, str(n), jobs) for n, jobs in enumerate((one, two, three))])
    assert [figures.tokens for figures in found] == [2, 20, 200]
    assert [(figures.matched, figures.jobs) for figures in found] == [(1, 3), (1, 2), (1, 3)]


def test_several_policies_in_one_batch() -> None:
    own = [job("a", policy="nirvana", step_cache="pab"), job("b", policy="chorus"), job("x", policy="none")]
    found = against([job("a"), job("b")], own)
    assert (found.policies, found.step_caches) == (("chorus", "nirvana"), ("none", "pab"))


@pytest.mark.parametrize("unscored", [None, {}])
def test_without_scores_there_is_no_accuracy(unscored: dict[str, bool] | None) -> None:
    own = [job("a", "semantic", 50, 5.0, scores=unscored), job("b", scores=unscored)]
    found = against([job("a"), job("b")], own)
    assert (found.scored, found.accuracy, found.accuracy_hits, found.spoiled, found.mended) == (0, *[None] * 4)
    assert (found.baseline_accuracy_hits, found.attributes, found.speedup_hits) == (1.0, {}, 2.0)


def test_a_video_without_scores_counts_neither_way() -> None:
    baseline = [job("a"), job("b", scores=None), job("c"), job("d")]
    own = [
        job("a", "semantic", scores=None),
        job("b", "semantic", scores=COLOUR),
        job("c", "semantic", scores=COLOUR),
        job("d", scores={"pattern": True}),
    ]
    found = against(baseline, own)
    assert (found.scored, found.accuracy, found.accuracy_hits) == (3, 1 / 3, 0.0)
    assert (found.spoiled, found.mended) == (1.0, 0.0)  # only c was scored both times
    assert found.attributes == {"colour": 1.0, "pattern": 1.0, "shape": 0.0}


def test_nothing_to_divide_by() -> None:
    found = against([job("a")], [job("a", "exact", 0, 0.0)])
    assert (found.speedup, found.speedup_hits, found.accuracy_hits, found.tokens_share) == (None, None, None, 0.0)
    (first, _) = compare([Batch(1, "x", [job("a", "exact", 0, 0.0)])] * 2)
    assert (first.tokens_share, first.speedup) == (None, None)


@pytest.mark.parametrize(
    ("own", "said", "hint"),
    [
        ([job("a", seed=2)], "no job was finished by all of them", "--seed-policy hash"),
        ([job("a", None)], r"batch 2 \(two\) has no finished job", "wait 2"),
        ([], r"batch 2 \(two\) has no finished job", "wait 2"),
        ([job("a", None), job("b")], "no job was finished by all of them", "wait for them"),
    ],
)
def test_nothing_matches(own: list[Made], said: str, hint: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        compare([Batch(1, "one", [job("a")]), Batch(2, "two", own)])
    assert caught.value.code == "nothing_matches" and hint in caught.value.hint


RESULTS = st.sampled_from([None, "miss", "semantic", "exact"])
SCORES = st.none() | st.dictionaries(st.sampled_from(["colour", "shape", "motion"]), st.booleans())
JOBS = st.lists(
    st.builds(job, st.sampled_from("abcdef"), RESULTS, st.integers(0, 9), st.integers(0, 9), scores=SCORES), max_size=12
)


@given(JOBS, JOBS, st.randoms(use_true_random=False))
def test_shares_are_shares_and_the_order_of_different_rows_is_nothing(
    baseline: list[Made], own: list[Made], rng: random.Random
) -> None:
    batches = [Batch(1, "one", [*baseline, job("z")]), Batch(2, "two", [*own, job("z")])]
    found = compare(batches)
    for figures in found:
        shares = [figures.hit_rate, figures.accuracy, figures.accuracy_hits, figures.spoiled, figures.mended]
        shares += [*figures.attributes.values(), *figures.attributes_hits.values()]
        assert all(0 <= share <= 1 for share in shares if share is not None)
        assert 1 <= figures.matched <= figures.jobs and figures.hits == figures.semantic_hits + figures.exact_hits
    assert found[0].spoiled in (None, 0.0) and found[0].mended in (None, 0.0)
    order = rng.sample("abcdefz", 7)
    shuffled = [
        replace(batch, jobs=sorted(batch.jobs, key=lambda made: order.index(made.prompt_key.decode())))
        for batch in batches
    ]
    assert compare(shuffled) == found
