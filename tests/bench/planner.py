"""How good plans are, and what they cost to make.

    python -m tests.bench.planner --data FOLDER [--subset NAME ...] [--settings 4step@0.475 ...] [--no-bound]
    python -m tests.bench.planner --rows 10000 100000 1000000

With FOLDER (prompts/*.csv with a column `prompt`, embeddings/*.npy): for each list, at each threshold and cost curve,
the plan's cost per prompt against a lower bound (lists up to 2,000 prompts), arrival order, k-means order and
nearest-neighbor chains, each of these served by the online rule without any cap on followers. 1.000 is no reuse.
Exact duplicates cost nothing on all sides.

The bound is the linear relaxation of facility location over all pairs >= tau. HiGHS solves it up to `--arcs` pairs
within `--seconds`; above, the bound is the best value of its Lagrangian dual that a subgradient ascent finds, which is
never above the linear bound. "cap" says that the bound knows of the cap on followers too.

With ROWS: seconds, peak memory and recall on synthetic vectors: topics around real embeddings (FOLDER's, else random
ones) with Pareto sizes. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from chorus_batch.jobs.curve import ROUNDING, Curve, Domain, FloatArray
from chorus_batch.jobs.embed import make_embedder
from chorus_batch.jobs.graph import Limits
from chorus_batch.jobs.plan import Items, Plan, number, online_cost, plan, plan_cost

CURVES = {"4step": (0.8, 0.625), "50step": (0.556, 0.286)}
SETTINGS = ("4step@0.475", "50step@0.475", "4step@0.65", "50step@0.65", "builtin")
BOUNDED = 2_000
LOST = -2.0


@dataclass(frozen=True)
class Problem:
    """Distinct requests of one domain, and the pairs that may be reused, as arrays over arcs (self included)."""

    n: int
    client: np.ndarray
    facility: np.ndarray
    cost: np.ndarray

    @classmethod
    def of(cls, vectors: FloatArray, domain: Domain) -> Problem:
        near = vectors @ vectors.T
        np.fill_diagonal(near, LOST)
        client, facility = np.nonzero(near >= domain.tau - ROUNDING)
        order = np.lexsort((client, facility))
        client, facility = client[order], facility[order]
        m = np.clip(near[client, facility], np.float32(domain.tau), np.float32(1.0))
        return cls(len(vectors), client, facility, domain.curve(m).astype(np.float64))


def linear_bound(problem: Problem, cap: int | None, seconds: float) -> float | None:
    from scipy.optimize import linprog
    from scipy.sparse import coo_array, vstack

    n, arcs = problem.n, len(problem.cost)
    cost = np.concatenate([np.ones(n), problem.cost])
    places = np.arange(arcs)
    once = coo_array(
        (np.ones(n + arcs), (np.append(np.arange(n), problem.client), np.arange(n + arcs))), shape=(n, n + arcs)
    )
    rows, columns = np.concatenate([places, places]), np.concatenate([n + places, problem.facility])
    opened = coo_array((np.repeat([1.0, -1.0], arcs), (rows, columns)), shape=(arcs, n + arcs))
    if cap is not None:
        values = np.concatenate([np.ones(arcs), np.full(n, -float(cap))])
        rows = np.concatenate([problem.facility, np.arange(n)])
        room = coo_array((values, (rows, np.concatenate([n + places, np.arange(n)]))), shape=(n, n + arcs))
        opened = vstack([opened, room])
    found = linprog(
        cost,
        A_ub=opened,
        b_ub=np.zeros(opened.shape[0]),
        A_eq=once,
        b_eq=np.ones(n),
        bounds=(0, 1),
        method="highs",
        options={"time_limit": seconds},
    )
    return float(found.fun) if found.status == 0 else None


def dual_bound(problem: Problem, cost: float, cap: int | None, rounds: int = 1500) -> float:
    """The best value of the Lagrangian dual on the way up from what each row pays at best; `cost` is a plan's."""
    n, client, facility, arc_cost = problem.n, problem.client, problem.facility, problem.cost
    price = np.ones(n)
    np.minimum.at(price, client, arc_cost)
    price = (price + 1.0) / 2
    best, best_price, pace, stale = 0.0, price, 1.5, 0
    for _ in range(rounds):
        gain = np.maximum(0.0, price[client] - arc_cost)
        if cap is not None and n > cap:
            wide = np.flatnonzero(np.bincount(facility[gain > 0], minlength=n) > cap)
            for j in wide.tolist():
                part = slice(*np.searchsorted(facility, [j, j + 1]))
                gain[part][np.argsort(-gain[part])[cap:]] = 0.0
        profit = np.bincount(facility, gain, n) + price - 1.0
        value = float(price.sum() - np.maximum(0.0, profit).sum())
        if value > best + 1e-7:
            best, best_price, stale = value, price, 0
        else:
            stale += 1
            if stale > 20:
                pace, stale, price = pace / 1.5, 0, best_price
                if pace < 1e-3:
                    break
                continue
        used = (gain > 0) & (profit[facility] > 0)
        slope = 1.0 - np.bincount(client[used], minlength=n) - (profit > 0)
        norm = float(slope @ slope)
        if norm == 0.0:
            break
        price = np.clip(price + pace * max(cost - value, 1e-6) / norm * slope, 0.0, 1.0)
    return best


def bound(problem: Problem, cost: float, cap: int | None, options: argparse.Namespace) -> tuple[float, str]:
    found = None
    if len(problem.cost) <= options.arcs:
        found = linear_bound(problem, cap, options.seconds)
    if found is not None:
        return found, "lp"
    return dual_bound(problem, cost, cap), "dual"


def k_means_order(vectors: FloatArray) -> np.ndarray:
    rng = np.random.default_rng(0)
    k = max(1, round((len(vectors) / 2) ** 0.5))
    centers = vectors[rng.choice(len(vectors), k, replace=False)]
    for _ in range(10):
        group = (vectors @ centers.T).argmax(axis=1)
        sums = np.zeros_like(centers)
        np.add.at(sums, group, vectors)
        filled = np.bincount(group, minlength=k) > 0
        centers[filled] = sums[filled] / np.linalg.norm(sums[filled], axis=1, keepdims=True)
    group = (vectors @ centers.T).argmax(axis=1)
    return np.lexsort((-(vectors * centers[group]).sum(axis=1), group))  # nearest to the center first


def chain_order(vectors: FloatArray) -> np.ndarray:
    """From row 0 always to the nearest row that wasn't visited."""
    left = vectors.copy()
    ids = np.arange(len(vectors))
    order, at = [0], vectors[0]
    left, ids = left[1:], ids[1:]
    dead = np.zeros(len(ids), dtype=bool)
    while len(order) < len(vectors):
        near = left @ at
        near[dead] = LOST
        place = int(near.argmax())
        order.append(int(ids[place]))
        at = left[place].copy()
        dead[place] = True
        if dead.sum() > len(dead) // 4 + 16:
            left, ids = left[~dead], ids[~dead]
            dead = np.zeros(len(ids), dtype=bool)
    return np.array(order)


def reordered(items: Items, order: np.ndarray) -> Items:
    names = ("domain", "request", "prompt", "embeddings", "reuse", "priority")
    return Items(*(getattr(items, name)[order] for name in names))


def items_of(vectors: FloatArray, prompts: np.ndarray | None = None) -> Items:
    n = len(vectors)
    codes = np.arange(n) if prompts is None else prompts
    zeros = np.zeros(n, np.int64)
    return Items(domain=zeros, request=codes, prompt=codes, embeddings=vectors, reuse=zeros, priority=zeros)


def domain_of(setting: str) -> Domain:
    if setting == "builtin":
        return Domain(0.79, Curve.of_boundaries([(0.79, 6, 6), (0.88, 8, 8)], 20))
    curve, _, tau = setting.partition("@")
    return Domain(float(tau), Curve.linear(float(tau), *CURVES[curve]))


def lists(data: Path, subset: list[str] | None, vectors_in: Path | None) -> Iterator[tuple[str, Items]]:
    embedder = make_embedder("minilm")
    for path in sorted(data.glob("prompts/*.csv")):
        if subset and not any(part in path.stem for part in subset):
            continue
        with path.open(encoding="utf-8", newline="") as file:
            prompts = [row["prompt"] for row in csv.DictReader(file)]
        kept = vectors_in / f"{path.stem}.npy" if vectors_in else None
        if kept and kept.exists():
            vectors = np.load(kept)
        else:
            vectors = embedder.embed(prompts)
            if kept:
                np.save(kept, vectors)
        yield path.stem, items_of(vectors, number(prompts, {}))
    for path in sorted(data.glob("embeddings/*.npy")):
        if subset and not any(part in path.stem for part in subset):
            continue
        vectors = np.load(path).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        same = number((row.tobytes() for row in vectors), {})
        yield path.stem, items_of(vectors, same)


def judged(name: str, items: Items, setting: str, options: argparse.Namespace) -> dict[str, object]:
    domain = domain_of(setting)
    began = time.perf_counter()
    made = plan(items, [domain])
    seconds = time.perf_counter() - began
    n, cost = len(items), plan_cost(made, items, [domain])
    distinct = np.unique(items.request, return_index=True)[1]
    orders = {"arrival": None, "k-means": k_means_order(items.embeddings)}
    if n <= 20_000:
        orders["chain"] = chain_order(items.embeddings)
    figures: dict[str, object] = {"list": name, "n": n, "setting": setting, "plan": cost / n, "seconds": seconds}
    for order_name, order in orders.items():
        there = items if order is None else reordered(items, order)
        figures[order_name] = online_cost(there, [domain]) / n
    figures["best order"] = min(float(figures[order_name]) for order_name in orders)
    if len(distinct) <= BOUNDED and not options.no_bound:
        problem = Problem.of(items.embeddings[distinct], domain)
        lower, kind = bound(problem, cost, None, options)
        if cost > 1.005 * lower:
            capped, capped_kind = bound(problem, cost, Limits().followers, options)
            if capped > lower:
                lower, kind = capped, f"{capped_kind}+cap"
        figures |= {"bound": lower / n, "kind": kind, "arcs": len(problem.cost), "gap": cost / lower - 1.0}
    figures["recall"] = recall(made)
    return figures


def recall(made: Plan) -> float | None:
    found = [graph.recall for graph in made.graphs if graph.recall is not None]
    return min(found, default=None)


def synthetic(rows: int, real: FloatArray | None) -> FloatArray:
    """Topics mixed of two real embeddings, of Pareto sizes, with a similarity inside a topic of 0.45 to 0.95."""
    rng = np.random.default_rng(7)
    dimension = 384 if real is None else real.shape[1]
    sizes = np.minimum(1 + rng.pareto(1.3, size=rows) * 3, 500).astype(np.int64)
    topics = int(np.searchsorted(np.cumsum(sizes), rows)) + 1
    topic = np.repeat(np.arange(topics), sizes[:topics])[:rows]
    rng.shuffle(topic)
    if real is None:
        centers = rng.standard_normal((topics, dimension), dtype=np.float32)
    else:
        share = rng.random((topics, 1), dtype=np.float32)
        a, b = rng.integers(len(real), size=(2, topics))
        centers = share * real[a] + (1 - share) * real[b]
    centers /= np.linalg.norm(centers, axis=1, keepdims=True)
    spread = np.sqrt(1.0 / rng.uniform(0.45, 0.95, topics) - 1.0).astype(np.float32)
    vectors = np.empty((rows, dimension), np.float32)
    for start in range(0, rows, 100_000):
        part = topic[start : start + 100_000]
        noise = rng.standard_normal((len(part), dimension), dtype=np.float32)
        if real is not None:  # noise as real texts differ, not in all directions alike
            a, b = rng.integers(len(real), size=(2, len(part)))
            noise = real[a] - real[b] + np.float32(0.02) * noise
        noise /= np.linalg.norm(noise, axis=1, keepdims=True)
        block = centers[part] + spread[part][:, None] * noise
        vectors[start : start + 100_000] = block / np.linalg.norm(block, axis=1, keepdims=True)
    return vectors


def timed(rows: int, setting: str, options: argparse.Namespace) -> dict[str, object]:
    real = None
    for path in sorted(options.data.glob("embeddings/*.npy")) if options.data else []:
        real = np.load(path).astype(np.float32)
    items, domain = items_of(synthetic(rows, real)), domain_of(setting)
    limits = Limits() if options.exact is None else replace(Limits(), exact=options.exact)
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    made = plan(items, [domain], limits=limits)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "rows": rows,
        "setting": setting,
        "seconds": seconds,
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak GB": after.ru_maxrss / 1e6,
        "recall": recall(made),
        "arcs": made.graphs[0].arcs / rows,
        "plan": plan_cost(made, items, [domain]) / rows,
    }


def shown(figures: dict[str, object], columns: dict[str, str]) -> str:
    cells = []
    for column, form in columns.items():
        value = figures.get(column)
        cells.append(format("" if value is None else value, form.split(".")[0] if value is None else form))
    return " ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder that holds prompts/ and embeddings/")
    parser.add_argument("--vectors", type=Path, help="folder that keeps the lists' embeddings from run to run")
    parser.add_argument("--subset", nargs="*", help="only lists whose names hold one of these")
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), help="CURVE@TAU, or builtin")
    parser.add_argument("--rows", type=int, nargs="*", default=[])
    parser.add_argument("--exact", type=int, help="compare every pair up to so many rows")
    parser.add_argument("--no-bound", action="store_true")
    parser.add_argument("--arcs", type=int, default=40_000, help="pairs up to which HiGHS is asked")
    parser.add_argument("--seconds", type=float, default=60.0, help="for one linear program")
    options = parser.parse_args()
    results: list[dict[str, object]] = []
    columns = {"list": "<31.31", "n": ">6", "setting": "<12", "plan": ">7.4f", "bound": ">7.4f", "gap": ">7.2%",
               "kind": "<8", "arrival": ">8.4f", "k-means": ">8.4f", "chain": ">8.4f", "recall": ">6.3f",
               "seconds": ">7.2f"}  # fmt: skip
    if options.data and not options.rows:
        print(" ".join(format(name, form.split(".")[0]) for name, form in columns.items()))
        for name, items in lists(options.data, options.subset, options.vectors):
            for setting in options.settings:
                figures = judged(name, items, setting, options)
                results.append(figures)
                print(shown(figures, columns), flush=True)
    columns = {"rows": ">9", "setting": "<12", "seconds": ">8.1f", "cpu": ">8.1f", "peak GB": ">8.2f",
               "recall": ">7.4f", "arcs": ">7.1f", "plan": ">8.4f"}  # fmt: skip
    if options.rows:
        print(" ".join(format(name, form.split(".")[0]) for name, form in columns.items()))
    for rows in options.rows:
        figures = timed(rows, options.settings[0], options)
        results.append(figures)
        print(shown(figures, columns), flush=True)
    gaps = [float(figures["gap"]) for figures in results if "gap" in figures]
    worse = [f for f in results if "best order" in f and float(f["plan"]) > float(f["best order"]) + 1e-6]
    summary = {"worst gap": max(gaps, default=None), "over 0.5 %": sum(gap > 0.005 for gap in gaps),
               "worse than an order": [(f["list"], f["setting"]) for f in worse], "results": results}  # fmt: skip
    json.dump(summary, sys.stdout)
    print()


if __name__ == "__main__":
    main()
