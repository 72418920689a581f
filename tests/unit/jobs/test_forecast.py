"""The forecast, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from chorus_batch.jobs import plan
from chorus_batch.jobs.cards.card import ModelCard, load_card
from chorus_batch.jobs.costs import Costs, Range
from chorus_batch.jobs.depth import Depths, depths, kept_steps, noise_levels, rows_at
from chorus_batch.jobs.forecast import Work, forecast

S, F, D = plan.SOURCE, plan.FOLLOWER, plan.DUPLICATE
CARD = replace(
    load_card("builtin"),
    boundaries={20: ((0.8, 6, 6), (0.9, 8, 10))},
    kinds={"object": {20: ((0.8, 12, 12),)}, "camera": {20: ()}},
)
PARAMETERS = replace(CARD.defaults, steps=20, policy="chorus")


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def work(**changes: object) -> Work:
    """A source with two followers, one of an entry of the cache, a duplicate, and a row that was made before."""
    columns: dict[str, object] = {
        "domain": ints(0, 0, 0, 0, 0, 0),
        "steps": ints(20, 20, 20, 20, 20, 20),
        "role": np.array([S, F, F, F, D, S], np.int8),
        "source": ints(-1, 0, 0, -1, 0, -1),
        "from_entry": np.array([False, False, False, True, False, False]),
        "fallback": ints(-1, -1, -1, -1, -1, -1),
        "made_before": np.array([False, False, False, False, False, True]),
        "position": np.arange(6),
        "priority": np.zeros(6, np.int64),
        "depths": Depths(ints(0, 6, 8, 8, 0, 0), ints(0, 6, 8, 8, 0, 0), ints(0, 6, 12, 8, 0, 0), ints(0, 6, 10, 8, 0, 0)),
        "entries": ints(3, 3, 3, 3, 3, 3),
    }  # fmt: skip
    return Work(**{**columns, **changes})  # type: ignore[arg-type]


def each(low: float, expected: float, high: float) -> dict[str, Range]:
    return dict.fromkeys(("miss", "semantic", "exact"), Range(low, expected, high))


COSTS = Costs(
    basis="by hand",
    traces=9,
    tokens_per_step=100,
    region_share=Range(0.25, 0.5, 0.75),
    seconds_per_token=Range(0.01, 0.02, 0.04, "spread"),
    beside=each(1, 2, 3) | {"exact": Range.exactly(0.5)},
    held=each(0, 1, 2) | {"exact": Range.exactly(0.25)},
    video_bytes=Range(10, 20, 30),
    latents_bytes=Range.exactly(7),
    entry_step_bytes=Range.exactly(1000),
)


def numbers(found: Range | None) -> tuple[float, float, float]:
    assert found is not None
    return found.low, found.expected, found.high


def test_counts_follow_from_the_plan() -> None:
    found = forecast(work(), [COSTS])
    assert (found.rows, found.sources, found.followers, found.followers_of_cache) == (6, 1, 3, 1)
    assert (found.duplicates, found.made_before, found.hit_rate) == (1, 1, 5 / 6)
    assert (found.steps_total, found.steps_skipped) == (120, 6 + 8 + 8 + 20 + 20)
    # Low: the cache loses the entry that one row starts from.
    assert numbers(found.ranges["hits"]) == (4, 5, 5)
    # High: the second follower's kind may be one that is skipped deeper.
    assert numbers(found.ranges["steps_skipped"]) == (62, 62, 66)


def test_tokens_are_counted_step_by_step() -> None:
    found = forecast(work(), [COSTS])
    # 20 steps in full; 14; 10 in full and 2 by half; 12. The duplicate and the row made before compute nothing.
    expected = 100 * (20 + 14 + (10 + 1) + 12)
    low = 100 * (20 + 14 + (6 + 2 * 0.25) + 12)  # skipped deeper, and a smaller region
    high = 100 * (20 + 14 + (10 + 2 * 0.75) + 12)
    assert numbers(found.ranges["tokens_computed"]) == pytest.approx((low, expected, high))
    assert numbers(found.ranges["tokens_total"]) == (12000, 12000, 12000)


def test_hours_are_denoising_and_what_is_beside_it() -> None:
    found = forecast(work(), [COSTS], gpu_price=3.0)
    expected = 0.02 * 5700 + 4 * 2 + 2 * 0.5
    assert numbers(found.ranges["gpu_hours"])[1] == pytest.approx(expected / 3600)
    assert numbers(found.ranges["gpu_hours"])[0] == pytest.approx((0.01 * 5250 + 4 * 1 + 1) / 3600)
    assert numbers(found.ranges["gpu_hours"])[2] == pytest.approx((0.04 * 5750 + 4 * 3 + 1) / 3600)
    assert numbers(found.ranges["cost"])[1] == pytest.approx(3 * expected / 3600)


def test_wall_time_is_the_plan_played_through() -> None:
    one = numbers(forecast(work(), [COSTS], workers=1).ranges["wall_seconds"])
    assert one[1] == pytest.approx(0.02 * 5700 + 4 * 1 + 2 * 0.25)
    # With many: the source, and then its longest follower; all else runs beside them.
    many = numbers(forecast(work(), [COSTS], workers=6).ranges["wall_seconds"])
    assert many[1] == pytest.approx((0.02 * 2000 + 1) + (0.02 * 1400 + 1))
    assert many[0] < many[1] < many[2]


def test_only_new_objects_take_room() -> None:
    found = forecast(work(), [COSTS])
    assert numbers(found.ranges["video_bytes"]) == (40, 80, 120)  # four are computed, two linked
    assert numbers(found.ranges["latents_bytes"]) == (28, 28, 28)
    assert numbers(found.ranges["entry_bytes"]) == (3000, 3000, 3000)  # the source's three latents
    assert numbers(found.ranges["bytes"]) == (3068, 3108, 3148)


def test_a_follower_whose_kind_is_never_reused_is_a_miss_that_leaves_an_entry() -> None:
    shallow = Depths(ints(0, 0, 8, 8, 0, 0), ints(0, 0, 8, 8, 0, 0), ints(0, 0, 8, 8, 0, 0), ints(0, 0, 8, 8, 0, 0))
    found = forecast(work(depths=shallow), [COSTS])
    assert numbers(found.ranges["hits"])[1] == 4 and found.steps_skipped == 56
    assert numbers(found.ranges["entry_bytes"])[1] == 6000


def test_nothing_is_invented_for_a_model_that_was_never_run() -> None:
    found = forecast(work(), [Costs("unknown")], gpu_price=1.0)
    unknown = {name for name, one in found.ranges.items() if one is None}
    assert set(found.ranges) - unknown == {"hits", "steps_skipped"}
    assert found.steps_skipped == 62


def test_a_domain_without_rows_needs_no_costs() -> None:
    assert forecast(work(), [COSTS, Costs("unknown")]).ranges["gpu_hours"] is not None


def test_no_rows() -> None:
    empty = Work(*(np.zeros(0, np.int64) for _ in range(2)), np.zeros(0, np.int8), ints(), np.zeros(0, np.bool_), ints(),
                 np.zeros(0, np.bool_), ints(), ints(), Depths.none(0), ints())  # fmt: skip
    found = forecast(empty, [], gpu_price=1.0)
    assert (found.rows, found.hit_rate, found.steps_total) == (0, 0.0, 0)
    assert all(numbers(one) == (0, 0, 0) for one in found.ranges.values())


def test_above_the_simulators_size_work_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chorus_batch.jobs.forecast.SIMULATED", 5)
    monkeypatch.setattr("chorus_batch.jobs.forecast.MANY", 2)
    assert numbers(forecast(work(), [COSTS], workers=2).ranges["wall_seconds"])[1] == pytest.approx(118.5 / 2)


@pytest.mark.parametrize(
    ("m", "kind", "expected"),
    [
        (0.79, None, (0, 0, 0, 0)),
        (0.8, None, (0, 6, 12, 6)),  # camera is never reused, an object deeper
        (0.95, None, (0, 8, 12, 10)),
        (0.95, "object", (12, 12, 12, 12)),
        (0.95, "camera", (0, 0, 0, 0)),
        (0.95, "several", (8, 8, 8, 10)),  # has no table of its own
        (0.95, "several object", (8, 8, 8, 10)),  # the shallowest
        (0.95, "several object camera", (0, 0, 0, 0)),
    ],
)
def test_depths_by_kind(m: float, kind: str | None, expected: tuple[int, ...]) -> None:
    found = depths(CARD, PARAMETERS, np.array([m], np.float32), [kind.split() if kind else ()])
    assert (found.low[0], found.k1[0], found.high[0], found.k2[0]) == expected


def test_policies_limit_the_depth() -> None:
    m = np.array([0.95], np.float32)
    first = depths(CARD, replace(PARAMETERS, policy="nirvana"), m, [["object"]])
    assert (first.low[0], first.k1[0], first.high[0], first.k2[0]) == (8, 8, 8, 8)
    assert depths(CARD, replace(PARAMETERS, policy="none"), m).k1[0] == 0


def test_another_source_widens_the_range() -> None:
    found = depths(CARD, PARAMETERS, np.array([0.95, 0.95], np.float32), [["several"], ["several"]])
    found.widen(ints(1), depths(CARD, PARAMETERS, np.array([0.95], np.float32), [["object"]]))
    assert (found.low.tolist(), found.k1.tolist(), found.high.tolist()) == ([8, 8], [8, 8], [8, 12])


def test_kept_latents() -> None:
    assert kept_steps(CARD, PARAMETERS) == len({6, 8, 9, 10, 12})
    assert kept_steps(CARD, replace(PARAMETERS, policy="nirvana")) == len({6, 8})
    assert kept_steps(CARD, replace(PARAMETERS, policy="none")) == 0


@pytest.mark.parametrize("steps", [4, 7, 20, 50])
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_tables_are_read_as_the_engine_reads_them(steps: int, shift: float) -> None:
    stages = pytest.importorskip("chorus_batch.chorus.stages")
    schedule = pytest.importorskip("chorus_batch.chorus.schedule")
    card: ModelCard = load_card("builtin")
    engine = stages.Boundaries.parse(card.boundaries, card.defaults.shift, card.kinds)
    asked = replace(PARAMETERS, steps=steps, shift=shift)
    assert noise_levels(steps, shift) == pytest.approx(schedule.noise_levels(steps, shift))
    for kind in (None, *card.kinds):
        rows = engine.rows(steps, schedule.noise_levels(steps, shift), kind)
        assert rows_at(card, asked, kind) == tuple((row.m_from, row.k1, row.k2) for row in rows)
    assert kept_steps(card, asked) == len(engine.kept_steps(steps, schedule.noise_levels(steps, shift)))
