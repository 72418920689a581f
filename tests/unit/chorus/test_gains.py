"""Law 6 for the gains: at least 1, never rising in k or in m, and exactly 1 where they're off."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus_batch.chorus.errors import GainError
from chorus_batch.chorus.gains import NO_GAINS, Gains

scores = st.floats(-1, 1.0001)
# Plain floats beside small ones: the largest times anything below 1 must stay finite.
sizes = st.floats(1, 8) | st.floats(1, 1e300)
untils = st.floats(0, 1, exclude_min=True)
taus = st.floats(-1, 1, exclude_max=True)
gains = st.builds(Gains, key=sizes, output=sizes, until=untils, tau=taus)


@st.composite
def walks(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """k <= later, k1 and steps."""
    steps = draw(st.integers(1, 100))
    k, later = sorted(draw(st.tuples(st.integers(0, steps), st.integers(0, steps))))
    return k, later, draw(st.integers(0, steps)), steps


@given(gains, walks(), scores)
def test_a_gain_lies_between_1_and_what_was_set(g: Gains, walk: tuple[int, int, int, int], m: float) -> None:
    k, _, k1, steps = walk
    key, output = g.at(k, k1=k1, steps=steps, m=m)
    assert 1 <= key <= g.key
    assert 1 <= output <= g.output


@given(gains, walks(), scores)
def test_a_gain_never_rises_along_the_steps(g: Gains, walk: tuple[int, int, int, int], m: float) -> None:
    k, later, k1, steps = walk
    before, after = g.at(k, k1=k1, steps=steps, m=m), g.at(later, k1=k1, steps=steps, m=m)
    assert before[0] >= after[0]
    assert before[1] >= after[1]


@given(gains, walks(), scores, scores)
def test_a_gain_never_rises_with_the_score(g: Gains, walk: tuple[int, int, int, int], a: float, b: float) -> None:
    k, _, k1, steps = walk
    low, high = g.at(k, k1=k1, steps=steps, m=min(a, b)), g.at(k, k1=k1, steps=steps, m=max(a, b))
    assert low[0] >= high[0]
    assert low[1] >= high[1]


@given(gains, walks(), scores)
def test_a_gain_of_1_is_exactly_off(g: Gains, walk: tuple[int, int, int, int], m: float) -> None:
    k, _, k1, steps = walk
    assert replace(g, key=1.0).at(k, k1=k1, steps=steps, m=m)[0] == 1.0
    assert replace(g, output=1.0).at(k, k1=k1, steps=steps, m=m)[1] == 1.0
    assert NO_GAINS.at(k, k1=k1, steps=steps, m=m) == (1.0, 1.0)


@given(gains, walks(), scores)
def test_nothing_is_amplified_once_the_decay_has_ended(g: Gains, walk: tuple[int, int, int, int], m: float) -> None:
    k, _, k1, steps = walk
    if k >= g.until * steps or m >= 1:
        assert g.at(k, k1=k1, steps=steps, m=m) == (1.0, 1.0)


def test_the_formula_by_hand() -> None:
    g = Gains(key=2.0, output=1.5, until=0.8, tau=0.75)
    # 20 steps from 8: the decay ends at 16; half way up the scores half of it is left.
    assert g.at(8, k1=8, steps=20, m=0.75) == (2.0, 1.5)
    assert g.at(12, k1=8, steps=20, m=0.75) == (1.5, 1.25)
    assert g.at(8, k1=8, steps=20, m=0.875) == (1.5, 1.25)
    assert g.at(12, k1=8, steps=20, m=0.875) == (1.25, 1.125)
    assert g.at(16, k1=8, steps=20, m=0.75) == (1.0, 1.0)
    # A score below tau amplifies no more than tau; a start past the end of the decay not at all.
    assert g.at(8, k1=8, steps=20, m=0.5) == (2.0, 1.5)
    assert g.at(17, k1=17, steps=20, m=0.75) == (1.0, 1.0)


def test_a_decay_ends_at_the_step_that_its_share_names() -> None:
    """0.07 * 100 is a hair above 7 in floating point."""
    assert Gains(key=1e15, output=1.0, until=0.07, tau=0.0).at(7, k1=0, steps=100, m=0.0) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", 0.99),
        ("output", 0.0),
        ("key", float("inf")),
        ("output", float("nan")),
        ("key", "2"),
        ("until", 0.0),
        ("until", 1.01),
        ("until", float("nan")),
        ("tau", 1.0),
        ("tau", float("-inf")),
    ],
)
def test_wrong_gains_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(GainError, match=field) as caught:
        replace(NO_GAINS, **{field: value})
    assert caught.value.code == "gain"


@pytest.mark.parametrize(
    ("k", "k1", "steps", "m"), [(0, 0, 4, float("nan")), (5, 0, 4, 0.8), (-1, 0, 4, 0.8), (1, 5, 4, 0.8)]
)
def test_arguments_outside_the_steps_are_refused(k: int, k1: int, steps: int, m: float) -> None:
    with pytest.raises(GainError):
        NO_GAINS.at(k, k1=k1, steps=steps, m=m)
