"""Law 6 for F: monotone in m, inside 0..N, (0, 0) below tau, for given and for scaled tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus_batch.chorus.errors import BoundaryError
from chorus_batch.chorus.schedule import noise_levels
from chorus_batch.chorus.stages import WAN_SHIFT, WAN_TABLES, Boundaries

WAN = Boundaries.parse(WAN_TABLES, WAN_SHIFT)
scores = st.floats(-1, 1)
shifts = st.floats(0.5, 12)


@st.composite
def tables(draw: st.DrawFn) -> Boundaries:
    steps = draw(st.integers(1, 60))
    count = draw(st.integers(1, 5))
    scores = sorted(draw(st.lists(st.floats(0, 1), min_size=count, max_size=count, unique=True)))
    pairs = [sorted(draw(st.tuples(st.integers(0, steps), st.integers(0, steps)))) for _ in range(count)]
    k1s, k2s = (sorted(pair[i] for pair in pairs) for i in (0, 1))
    return Boundaries.parse({steps: list(zip(scores, k1s, k2s, strict=True))}, draw(shifts))


@given(tables(), scores, scores, st.integers(1, 80), shifts)
def test_never_falls_as_the_score_rises(f: Boundaries, a: float, b: float, steps: int, shift: float) -> None:
    levels = noise_levels(steps, shift)
    low, high = f.at(min(a, b), steps, levels), f.at(max(a, b), steps, levels)
    assert low[0] <= high[0]
    assert low[1] <= high[1]
    assert 0 <= high[0] <= high[1] <= steps


@given(tables(), scores, st.integers(1, 80))
def test_no_reuse_below_tau(f: Boundaries, m: float, steps: int) -> None:
    if m < f.tau:
        assert f.at(m, steps) == (0, 0)


@given(tables(), scores, st.integers(1, 80), shifts)
def test_kept_steps_are_exactly_what_some_score_reads(f: Boundaries, m: float, steps: int, shift: float) -> None:
    levels = noise_levels(steps, shift)
    kept = f.kept_steps(steps, levels)
    k1, k2 = f.at(m, steps, levels)
    read = ({k1} - {0}) | set(range(k1 + 1, k2 + 1))
    assert read <= kept
    every = [f.at(row.m_from, steps, levels) for row in f.rows(steps, levels)]
    assert kept == {k for k1, k2 in every for k in ({k1} - {0}) | set(range(k1 + 1, k2 + 1))}


@given(st.integers(1, 200), scores, shifts)
def test_scaling_never_skips_deeper_into_the_noise(steps: int, m: float, shift: float) -> None:
    """The latent at the scaled k1 is at least as noisy as at the table's, for any schedule."""
    levels = noise_levels(steps, shift)
    k1, _ = WAN.at(m, steps, levels)
    given_table = steps if steps in WAN.tables else 50
    own_k1, _ = WAN.at(m, given_table)
    if m >= WAN.tau_at(steps):
        assert levels[k1] >= noise_levels(given_table, WAN_SHIFT)[own_k1] - 1e-6


def test_the_given_tables_are_read_as_they_stand() -> None:
    assert WAN.tau == 0.65
    assert (WAN.tau_at(4), WAN.tau_at(50), WAN.tau_at(25)) == (0.75, 0.65, 0.65)
    assert [WAN.at(m, 4) for m in (0.74, 0.75, 0.919, 0.92, 1.0)] == [(0, 0), (1, 2), (1, 2), (2, 3), (2, 3)]
    assert [WAN.at(m, 50) for m in (0.64, 0.65, 0.8, 0.85, 0.9, 0.99)] == [
        (0, 0), (5, 10), (10, 18), (15, 25), (20, 30), (25, 35),
    ]  # fmt: skip
    assert WAN.kept_steps(4) == {1, 2, 3}
    assert WAN.kept_steps(50) == {*range(5, 36)}


def test_other_numbers_of_steps_are_scaled_by_noise_level_rounded_down() -> None:
    assert WAN.at(0.9, 100) == (40, 60)
    assert WAN.at(0.9, 25) == (10, 15)
    assert WAN.at(0.9, 20) == (8, 12)
    assert WAN.at(0.65, 20) == (2, 4)
    assert WAN.at(0.65, 8) == (0, 1)


def test_the_same_number_of_steps_at_another_shift_is_scaled_too() -> None:
    """Shift 8 is noisier at the same step, so the same noise level comes later; shift 3 is cleaner, so earlier."""
    assert WAN.at(0.9, 50, noise_levels(50, 5.0)) == (20, 30)
    assert WAN.at(0.9, 50, noise_levels(50, 8.0)) == (25, 35)
    assert WAN.at(0.9, 50, noise_levels(50, 3.0)) == (14, 23)


def test_stage_1_tables_keep_only_the_starts() -> None:
    builtin = Boundaries.parse({"20": [[0.75, 6, 6], [0.85, 8, 8]], "4": [[0.75, 1, 1]]}, 3.0)
    assert builtin.kept_steps(20) == {6, 8}
    assert builtin.kept_steps(4) == {1}


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"many": [[0.5, 1, 1]]},
        {0: [[0.5, 0, 0]]},
        {4: []},
        {4: [[0.5, 1]]},
        {4: [[0.5, 1, 5]]},
        {4: [[0.5, 2, 1]]},
        {4: [[0.5, -1, 1]]},
        {4: [[0.5, 1.5, 2]]},
        {4: [["0.5", 1, 2]]},
        {4: [[float("nan"), 1, 2]]},
        {4: [[0.5, 1, 2], [0.5, 2, 2]]},
        {4: [[0.7, 1, 2], [0.6, 2, 2]]},
        {4: [[0.6, 2, 2], [0.7, 1, 2]]},
        {4: [[0.6, 1, 3], [0.7, 1, 2]]},
    ],
)
def test_a_bad_table_is_refused(bad: dict[int, list[list[float]]]) -> None:
    with pytest.raises(BoundaryError, match="boundaries"):
        Boundaries.parse(bad, 3.0)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(BoundaryError):
        WAN.at(float("nan"), 50)
    with pytest.raises(BoundaryError):
        WAN.at(0.9, 0)
    with pytest.raises(BoundaryError, match="51"):
        WAN.at(0.9, 50, noise_levels(49, 5.0))
    with pytest.raises(BoundaryError, match="shift"):
        Boundaries.parse(WAN_TABLES, 0.0)
