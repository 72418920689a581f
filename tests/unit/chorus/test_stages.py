"""Law 6 for F: monotone in m, inside 0..N, (0, 0) below tau, for given and for scaled tables, for every kind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus_batch.chorus.errors import BoundaryError
from chorus_batch.chorus.schedule import noise_levels
from chorus_batch.chorus.stages import WAN_SHIFT, WAN_TABLES, Boundaries

WAN = Boundaries.parse(WAN_TABLES, WAN_SHIFT)
scores = st.floats(-1, 1)
shifts = st.floats(0.5, 12)


KINDS = ("motion", "attribute", "background")
kinds = st.sampled_from([None, *KINDS, "unheard of"])


@st.composite
def plain(draw: st.DrawFn, least: int = 1) -> dict[int, list[list[float]]]:
    """Tables as plain data, for one to three numbers of steps; a table of a kind may be empty."""
    made = {}
    for steps in draw(st.lists(st.integers(1, 60), min_size=1, max_size=3, unique=True)):
        count = draw(st.integers(least, 5))
        scores = sorted(draw(st.lists(st.floats(0, 1), min_size=count, max_size=count, unique=True)))
        pairs = [sorted(draw(st.tuples(st.integers(0, steps), st.integers(0, steps)))) for _ in range(count)]
        k1s, k2s = (sorted(pair[i] for pair in pairs) for i in (0, 1))
        made[steps] = [list(row) for row in zip(scores, k1s, k2s, strict=True)]
    return made


@st.composite
def tables(draw: st.DrawFn) -> Boundaries:
    own = draw(st.dictionaries(st.sampled_from(KINDS), plain(least=0), max_size=3))
    return Boundaries.parse(draw(plain()), draw(shifts), own)


@given(tables(), scores, scores, st.integers(1, 80), shifts, kinds)
def test_never_falls_as_the_score_rises(
    f: Boundaries, a: float, b: float, steps: int, shift: float, kind: str | None
) -> None:
    levels = noise_levels(steps, shift)
    low, high = f.at(min(a, b), steps, levels, kind), f.at(max(a, b), steps, levels, kind)
    assert low[0] <= high[0]
    assert low[1] <= high[1]
    assert 0 <= low[0] <= low[1] <= steps
    assert 0 <= high[0] <= high[1] <= steps


@given(tables(), scores, st.integers(1, 80), kinds)
def test_no_reuse_below_tau(f: Boundaries, m: float, steps: int, kind: str | None) -> None:
    assert f.tau <= f.tau_at(steps)
    if m < f.tau_at(steps):
        assert f.at(m, steps, kind=kind) == (0, 0)


@given(tables(), st.integers(1, 80))
def test_tau_is_where_the_first_kind_begins(f: Boundaries, steps: int) -> None:
    begins = [rows[0].m_from for kind in (None, *f.kinds) if (rows := f.rows(steps, kind=kind))]
    assert f.tau_at(steps) == min(begins)


@given(tables(), scores, st.integers(1, 80), shifts, kinds)
def test_kept_steps_are_exactly_what_some_score_of_some_kind_reads(
    f: Boundaries, m: float, steps: int, shift: float, kind: str | None
) -> None:
    levels = noise_levels(steps, shift)
    kept = f.kept_steps(steps, levels)
    k1, k2 = f.at(m, steps, levels, kind)
    read = ({k1} - {0}) | set(range(k1 + 1, k2 + 1))
    assert read <= kept
    every = [
        f.at(row.m_from, steps, levels, known) for known in (None, *f.kinds) for row in f.rows(steps, levels, known)
    ]
    assert kept == {k for k1, k2 in every for k in ({k1} - {0}) | set(range(k1 + 1, k2 + 1))}


@given(tables(), st.integers(1, 80), scores, shifts, kinds)
def test_scaling_never_skips_deeper_into_the_noise(
    f: Boundaries, steps: int, m: float, shift: float, kind: str | None
) -> None:
    """The latents at the scaled k1 and k2 are at least as noisy as at the table's, for any schedule and kind."""
    levels = noise_levels(steps, shift)
    own = f.kinds.get(kind or "", f.tables)
    table = steps if steps in own else max(own)
    for scaled, k in zip(f.at(m, steps, levels, kind), f.at(m, table, kind=kind), strict=True):
        assert levels[scaled] >= noise_levels(table, f.shift)[k] - 1e-6


@given(tables(), st.integers(1, 80), scores)
def test_a_kind_without_a_table_reads_the_general_one(f: Boundaries, steps: int, m: float) -> None:
    general = Boundaries(f.tables, f.shift)
    for kind in {None, *KINDS, "unheard of"} - set(f.kinds):
        assert f.at(m, steps, kind=kind) == general.at(m, steps)


@given(plain(), st.integers(1, 80), scores, shifts)
def test_a_kind_is_scaled_exactly_as_the_general_table_is(
    data: dict[int, list[list[float]]], steps: int, m: float, shift: float
) -> None:
    f = Boundaries.parse({50: [[0.5, 1, 1]]}, 3.0, {"motion": data})
    levels = noise_levels(steps, shift)
    assert f.at(m, steps, levels, "motion") == Boundaries.parse(data, 3.0).at(m, steps, levels)


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


def test_a_kind_has_rows_of_its_own_and_an_empty_table_is_never_reused() -> None:
    f = Boundaries.parse(
        {"20": [[0.79, 6, 6]], "4": [[0.79, 1, 1]]},
        3.0,
        {"attribute": {"20": [[0.75, 8, 12], [0.9, 12, 16]], "4": [[0.85, 2, 3]]}, "camera": {"20": []}},
    )
    assert f.at(0.95, 20) == f.at(0.95, 20, kind="motion") == (6, 6)
    assert [f.at(m, 20, kind="attribute") for m in (0.74, 0.75, 0.95)] == [(0, 0), (8, 12), (12, 16)]
    assert f.at(1.0, 20, kind="camera") == f.at(1.0, 4, kind="camera") == f.at(1.0, 50, kind="camera") == (0, 0)
    assert (f.tau, f.tau_at(20), f.tau_at(4)) == (0.75, 0.75, 0.79)
    assert f.kept_steps(20) == {6, *range(8, 17)}
    assert f.kept_steps(4) == {1, 2, 3}


BAD_ROWS = pytest.mark.parametrize(
    "bad",
    [
        {},
        {"many": [[0.5, 1, 1]]},
        {0: [[0.5, 0, 0]]},
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


@BAD_ROWS
def test_a_bad_table_is_refused(bad: dict[int, list[list[float]]]) -> None:
    with pytest.raises(BoundaryError, match="boundaries"):
        Boundaries.parse(bad, 3.0)


@BAD_ROWS
def test_a_bad_table_of_a_kind_is_refused_by_its_name(bad: dict[int, list[list[float]]]) -> None:
    with pytest.raises(BoundaryError, match="kind 'motion'"):
        Boundaries.parse({4: [[0.5, 1, 1]]}, 3.0, {"background": {4: [[0.5, 1, 1]]}, "motion": bad})


def test_only_a_kind_may_have_an_empty_table() -> None:
    with pytest.raises(BoundaryError, match="at least one"):
        Boundaries.parse({4: []}, 3.0)
    with pytest.raises(BoundaryError, match="under a number of steps"):
        Boundaries.parse({4: [[0.5, 1, 1]]}, 3.0, {"motion": [[0.5, 1, 1]]})  # type: ignore[dict-item]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(BoundaryError):
        WAN.at(float("nan"), 50)
    with pytest.raises(BoundaryError):
        WAN.at(0.9, 0)
    with pytest.raises(BoundaryError, match="51"):
        WAN.at(0.9, 50, noise_levels(49, 5.0))
    with pytest.raises(BoundaryError, match="shift"):
        Boundaries.parse(WAN_TABLES, 0.0)
