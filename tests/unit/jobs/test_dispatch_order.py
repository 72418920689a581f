"""The order of dispatch: what each row's place promises."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus_batch.jobs.dispatch_order import positions, urgency


def order(source: list[int], cost: list[float], *, entry: list[int] | None = None, **limits: int) -> list[int]:
    """The rows, first to last, all of one priority."""
    n = len(source)
    entries = np.array(entry if entry is not None else [-1] * n)
    made = positions(np.array(source), entries, np.array(cost), np.zeros(n, np.int64), **limits)
    return list(np.argsort(made))


def test_clusters_by_work_each_behind_its_source_and_single_rows_after_them() -> None:
    # Rows 0 and 3 are sources: of one follower, and of three cheap ones that are more work together; 1 is alone.
    source = [-1, -1, 0, -1, 3, 3, 3]
    cost = [1, 1, 0.6, 1, 0.3, 0.3, 0.3]
    assert order(source, cost, lead=0, tail=0) == [3, 4, 5, 6, 0, 2, 1]


def test_the_next_sources_are_under_way_before_their_turn() -> None:
    source = [-1, 0, 0, 0, -1, 4, 4, -1, 7]
    cost = [1, 0.5, 0.5, 0.5, 1, 0.5, 0.5, 1, 0.5]
    assert order(source, cost, lead=1, tail=0) == [0, 4, 1, 2, 3, 7, 5, 6, 8]
    assert order(source, cost, tail=0)[:3] == [0, 4, 7]  # with few clusters that is: all sources first


def test_the_cheapest_to_misplace_come_last_and_the_dearest_of_them_first() -> None:
    source = [-1, 0, 0, -1, 3, 3, -1]
    cost = [1, 0.8, 0.7, 1, 0.3, 0.4, 1]
    # The tail is the last cluster's: row 6, which is alone, comes before it.
    assert order(source, cost, tail=2) == [0, 3, 1, 2, 6, 5, 4]


def test_followers_of_one_entry_are_a_cluster() -> None:
    source = [-1, -1, -1, -1, 3]
    entry = [7, 8, 7, -1, -1]
    assert order(source, [0.5, 0.5, 0.5, 1, 0.5], entry=entry, tail=0) == [3, 4, 0, 2, 1]


def test_a_source_is_as_urgent_as_who_waits_for_it() -> None:
    source = np.array([-1, 0, 1, -1])
    assert urgency(source, np.array([0, 1, 9, 2])).tolist() == [9, 9, 9, 2]
    none = np.full(4, -1)
    made = positions(source, none, np.array([1, 0.5, 0, 1]), np.array([0, 1, 9, 2]))
    assert made.tolist() == [0, 1, 2, 3]


def test_nothing_to_order() -> None:
    empty = np.zeros(0, np.int64)
    assert len(positions(empty, empty, np.zeros(0), empty)) == 0


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[int], list[int], list[float], list[int]]:
    n = draw(st.integers(1, 40))
    heads = [i for i in range(n) if draw(st.booleans())] or [0]
    entry = [draw(st.integers(0, 2)) if i not in heads and draw(st.booleans()) else -1 for i in range(n)]
    source = [-1 if i in heads or entry[i] >= 0 else draw(st.sampled_from(heads)) for i in range(n)]
    cost = [1.0 if i in heads else draw(st.floats(0.0, 0.9)) for i in range(n)]
    return source, entry, cost, [draw(st.integers(-1, 1)) for _ in range(n)]


@settings(max_examples=150, deadline=None)
@given(plans(), st.integers(0, 5), st.integers(0, 8))
def test_every_row_has_a_place_behind_its_source_and_by_urgency(
    plan: tuple[list[int], list[int], list[float], list[int]], lead: int, tail: int
) -> None:
    source, entry, cost, priority = (np.array(column) for column in plan)
    made = positions(source, entry, cost, priority, lead=lead, tail=tail)
    assert sorted(made) == list(range(len(made)))
    waits = np.flatnonzero(source >= 0)
    assert (made[source[waits]] < made[waits]).all()
    urgent = urgency(source, priority)
    assert (np.diff(urgent[np.argsort(made)]) <= 0).all()
    assert (made == positions(source, entry, cost, priority, lead=lead, tail=tail)).all()
