"""What a plan will cost: hits, steps, tokens, worker hours, wall time, bytes, money, each with its range. Pure.

A count follows from the plan and is met exactly where the plan is followed. Seconds and bytes are what finished jobs
showed (costs.py). A figure for which nothing is known is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorus_batch.jobs import plan as planning
from chorus_batch.jobs.costs import Costs, Range, times
from chorus_batch.jobs.depth import Depths
from chorus_batch.jobs.nearest import IntArray
from chorus_batch.jobs.simulation import PlannedJob, simulate

Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]

# Above so many rows, and so many for each worker, wall time is the work shared among the workers: the simulator would
# take seconds, and the two differ by less than a percent then.
SIMULATED = 20_000
MANY = 50


@dataclass(frozen=True)
class Work:
    """The rows to forecast, as columns of length n. `domain` is an index into the sequences of domains.

    role, source, fallback, position: as in plan.Plan, rows by index, -1 for none. from_entry: follows an entry of the
    cache. made_before: the same request was finished in an earlier batch, so that this row is a link. depths: of the
    followers. entries: how many latents a row keeps in the cache if it is computed in full, 0 where none.
    """

    domain: IntArray
    steps: IntArray
    role: NDArray[np.int8]
    source: IntArray
    from_entry: Bools
    fallback: IntArray
    made_before: Bools
    position: IntArray
    priority: IntArray
    depths: Depths
    entries: IntArray

    def __len__(self) -> int:
        return len(self.role)

    @property
    def linked(self) -> Bools:
        """Rows that get a finished video, and cost next to nothing."""
        return np.asarray((self.role == planning.DUPLICATE) | self.made_before)


@dataclass(frozen=True)
class Forecast:
    """What is expected, counted in rows and denoising steps; `ranges` by name of the figure, None where unknown.

    The names: hits, steps_skipped, tokens_total, tokens_computed, gpu_hours (of all jobs, claim to commit: what
    --max-gpu-hours counts), wall_seconds (first claim to last video, with `workers`), video_bytes, latents_bytes,
    entry_bytes, bytes, cost (gpu_hours at `gpu_price`).
    """

    rows: int
    sources: int
    followers: int
    followers_of_cache: int  # of the followers, those that start from an entry of an earlier batch
    duplicates: int
    made_before: int  # rows whose very request was finished in an earlier batch
    hit_rate: float
    steps_total: int
    steps_skipped: int
    workers: int
    gpu_price: float | None  # for an hour of one worker
    ranges: Mapping[str, Range | None]
    basis: tuple[str, ...]  # what seconds and bytes come from, for each domain
    memory: tuple[str, ...] = ()  # what each domain needs of a device, where its model's card tells

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def forecast(work: Work, costs: Sequence[Costs], *, workers: int = 1, gpu_price: float | None = None) -> Forecast:
    """The forecast of some rows, `costs` by domain."""
    linked = work.linked
    low, skipped, high = (_skipped(work, linked, k) for k in (work.depths.low, work.depths.k1, work.depths.high))
    hits = linked | (skipped > 0)
    # The cost is low where much is skipped.
    by_cost = {"low": high, "expected": skipped, "high": low}
    tokens = {name: _tokens(work, linked, costs, k, name) for name, k in by_cost.items()}
    seconds = {name: _seconds(work, linked, costs, tokens[name], k, name) for name, k in by_cost.items()}
    gpu = _range({name: None if s is None else float(s[0].sum()) / 3600 for name, s in seconds.items()}, _why(costs))
    ranges: dict[str, Range | None] = {
        "hits": _hits(work, linked, hits, low, high),
        "steps_skipped": Range(float(low.sum()), float(skipped.sum()), float(high.sum()), _steps_why(low, high)),
        "tokens_total": _tokens_total(work, costs),
        "tokens_computed": _range({k: None if t is None else float(t.sum()) for k, t in tokens.items()}, _why(costs)),
        "gpu_hours": gpu,
        "wall_seconds": _wall(work, linked, seconds, workers, _why(costs)),
        **_storage(work, linked, hits, costs),
        "cost": times(gpu, gpu_price),
    }
    followers = (work.role == planning.FOLLOWER) & ~work.made_before
    return Forecast(
        rows=len(work),
        sources=int(((work.role == planning.SOURCE) & ~work.made_before).sum()),
        followers=int(followers.sum()),
        followers_of_cache=int((followers & work.from_entry).sum()),
        duplicates=int(((work.role == planning.DUPLICATE) & ~work.made_before).sum()),
        made_before=int(work.made_before.sum()),
        hit_rate=float(hits.mean()) if len(work) else 0.0,
        steps_total=int(work.steps.sum()),
        steps_skipped=int(skipped.sum()),
        workers=workers,
        gpu_price=gpu_price,
        ranges=ranges,
        basis=tuple(dict.fromkeys(cost.basis for cost in costs)),
    )


def _skipped(work: Work, linked: Bools, k1: IntArray) -> IntArray:
    return np.where(linked, work.steps, np.where(work.role == planning.FOLLOWER, k1, 0))


def _hits(work: Work, linked: Bools, hits: Bools, low: IntArray, high: IntArray) -> Range:
    fragile = hits & ~linked & work.from_entry & (work.fallback < 0)
    least = int((linked | (low > 0)).sum()) - int((fragile & (low > 0)).sum())
    most = int((linked | (high > 0)).sum())
    why = "the plan, followed"
    if fragile.any():
        why += f"; low: the cache loses the entries that {int(fragile.sum())} rows start from"
    if int((linked | (low > 0)).sum()) < most:
        why += "; low and high: from another source, or a difference of another kind"
    return Range(float(least), float(hits.sum()), float(most), why)


def _steps_why(low: IntArray, high: IntArray) -> str:
    return "the plan, followed" + (
        "" if np.array_equal(low, high) else "; low and high: from another source, or a difference of another kind"
    )


def _why(costs: Sequence[Costs]) -> str:
    return "; ".join(dict.fromkeys(cost.seconds_per_token.why for cost in costs if cost.seconds_per_token))


def _range(values: Mapping[str, float | None], why: str) -> Range | None:
    low, expected, high = (values[name] for name in ("low", "expected", "high"))
    if low is None or expected is None or high is None:
        return None
    return Range(low, expected, high, why)


def _rows(work: Work, domain: int) -> Bools:
    return np.asarray(work.domain == domain)


def _tokens_total(work: Work, costs: Sequence[Costs]) -> Range | None:
    total = 0.0
    for domain, cost in enumerate(costs):
        rows = _rows(work, domain)
        if cost.tokens_per_step is None and rows.any():
            return None
        total += float(work.steps[rows].sum()) * (cost.tokens_per_step or 0.0)
    return Range.exactly(total, "tokens of a step, times steps")


def _tokens(work: Work, linked: Bools, costs: Sequence[Costs], skipped: IntArray, which: str) -> Floats | None:
    """Tokens that each row computes; None if a domain's tokens aren't known."""
    tokens = np.zeros(len(work))
    for domain, cost in enumerate(costs):
        rows = _rows(work, domain) & ~linked
        if not rows.any():
            continue
        if cost.tokens_per_step is None:
            return None
        share = getattr(cost.region_share, which)
        regional = np.maximum(work.depths.k2[rows] - work.depths.k1[rows], 0)
        whole = work.steps[rows] - skipped[rows] - regional
        computed = np.where(skipped[rows] > 0, whole + share * regional, work.steps[rows] * cost.step_share)
        tokens[rows] = cost.tokens_per_step * computed
    return tokens


def _seconds(
    work: Work, linked: Bools, costs: Sequence[Costs], tokens: Floats | None, skipped: IntArray, which: str
) -> tuple[Floats, Floats] | None:
    """Of each row: seconds from claim to commit, and those in which its worker can't begin another."""
    total, held = np.zeros(len(work)), np.zeros(len(work))
    result = np.where(linked, 2, np.where(skipped > 0, 1, 0))
    for domain, cost in enumerate(costs):
        rows = _rows(work, domain)
        if not rows.any():
            continue
        if cost.seconds_per_token is None or tokens is None:
            return None
        denoise = getattr(cost.seconds_per_token, which) * tokens
        for code, name in enumerate(("miss", "semantic", "exact")):
            part = rows & (result == code)
            total[part] = denoise[part] + getattr(cost.beside[name], which)
            held[part] = denoise[part] + getattr(cost.held[name], which)
    return total, held


def _wall(
    work: Work, linked: Bools, seconds: Mapping[str, tuple[Floats, Floats] | None], workers: int, why: str
) -> Range | None:
    """Simulated on the plan with the expected seconds; the ends of the range in proportion to the work."""
    low, expected, high = (seconds[name] for name in ("low", "expected", "high"))
    if low is None or expected is None or high is None:
        return None
    held = expected[1]
    if not len(work) or not float(held.sum()):
        return Range.exactly(0.0)
    if len(work) > max(SIMULATED, MANY * workers):
        length, how = float(held.sum()) / workers, "shared evenly"
    else:
        length, how = simulate(_jobs(work, linked, held), workers).length, f"simulated with {workers} workers"
    low_share, high_share = float(low[1].sum() / held.sum()), float(high[1].sum() / held.sum())
    return Range(length * low_share, length, length * high_share, f"{how}; {why}")


def _jobs(work: Work, linked: Bools, held: Floats) -> list[PlannedJob]:
    columns = zip(
        held.tolist(), work.position.tolist(), work.source.tolist(), work.fallback.tolist(), work.priority.tolist(),
        linked.tolist(), strict=True,
    )  # fmt: skip
    return [
        PlannedJob(
            cost=cost,
            position=position,
            source=source if source >= 0 else None,
            fallback=fallback if fallback >= 0 else None,
            priority=priority,
            duplicate=duplicate,
        )
        for cost, position, source, fallback, priority, duplicate in columns
    ]


def _storage(work: Work, linked: Bools, hits: Bools, costs: Sequence[Costs]) -> dict[str, Range | None]:
    """Bytes of new objects; a linked row has none."""
    sums = {name: np.zeros(3) for name in ("video_bytes", "latents_bytes", "entry_bytes")}
    known = dict.fromkeys(sums, True)
    whys: dict[str, None] = {}
    for domain, cost in enumerate(costs):
        rows = _rows(work, domain)
        counts = {
            "video_bytes": (int((rows & ~linked).sum()), cost.video_bytes),
            "latents_bytes": (int((rows & ~linked).sum()), cost.latents_bytes),
            "entry_bytes": (int(work.entries[rows & ~hits].sum()), cost.entry_step_bytes),
        }
        for name, (count, each) in counts.items():
            if each is not None:
                sums[name] += count * np.array([each.low, each.expected, each.high])
                whys[each.why] = None
            elif count:
                known[name] = False
    why = "; ".join(whys)

    def summed(three: Floats) -> Range:
        low, expected, high = three.tolist()
        return Range(low, expected, high, why)

    found = {name: summed(sums[name]) if known[name] else None for name in sums}
    return found | {"bytes": summed(np.sum(list(sums.values()), axis=0)) if all(known.values()) else None}
