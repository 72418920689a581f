"""The planner: what every plan must obey, what it must never cost, and what it says about bad input."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus_batch.jobs.curve import ROUNDING, Curve, Domain, PlanInputError, Price, Reuse
from chorus_batch.jobs.embed import UnusableVector
from chorus_batch.jobs.graph import AUTO, FORCE, OFF, Limits
from chorus_batch.jobs.neighbour_tables import Effort
from chorus_batch.jobs.plan import ROLES, Cached, Items, Plan, number, online_cost, plan, plan_cost, unshared
from chorus_batch.jobs.templates import Slots

DOMAIN = Domain(0.65, Curve.linear(0.65))
STEPWISE = Domain(0.75, Curve.of_boundaries([[0.75, 6, 6], [0.85, 8, 8]], 20))


def vectors_of(rows: int, topics: int, noise: float, seed: int, dimension: int = 16) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((topics, dimension))
    vectors = centers[rng.integers(topics, size=rows)] + noise * rng.standard_normal((rows, dimension))
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), dtype=np.float32)


def items_of(vectors: np.ndarray, **columns: object) -> Items:
    n = len(vectors)
    index, zeros = np.arange(n), np.zeros(n, np.int64)
    items = Items(domain=zeros, request=index, prompt=index, embeddings=vectors, reuse=zeros, priority=zeros)
    return replace(items, **{name: np.asarray(values) for name, values in columns.items()})


@st.composite
def batches(draw: st.DrawFn) -> tuple[Items, list[Domain], Cached, Limits]:
    n = draw(st.integers(1, 40))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    prompts = draw(st.integers(1, n))
    prompt = rng.integers(prompts, size=n)
    by_prompt = vectors_of(prompts + 8, draw(st.integers(1, 8)), draw(st.sampled_from([0.0, 0.2, 0.5, 2.0])), seed)
    domain = rng.integers(draw(st.integers(1, 2)), size=n)
    request = number(zip(domain, prompt, rng.integers(draw(st.integers(1, 3)), size=n), strict=True), {})
    shares = draw(st.sampled_from([(1.0, 0.0, 0.0), (0.6, 0.2, 0.2)]))
    items = Items(
        domain=domain,
        request=request,
        prompt=prompt,
        embeddings=by_prompt[prompt],
        reuse=rng.choice([AUTO, FORCE, OFF], p=shares, size=n),
        priority=rng.integers(draw(st.integers(1, 3)), size=n),
    )
    held = draw(st.integers(0, 8))
    which = rng.integers(prompts + 8, size=held)
    cached = Cached(
        entry=1000 + np.arange(held), domain=rng.integers(2, size=held), prompt=which, embeddings=by_prompt[which]
    )
    tau = draw(st.sampled_from([0.0, 0.5, 0.65, 0.9, 1.0]))
    limits = draw(
        st.sampled_from(
            [
                Limits(),
                Limits(followers=1, arcs=2, few_arcs=0),
                Limits(followers=3, search=0),
                Limits(search=0, passes=0),
                Limits(exact=4, large_arcs=3, effort=Effort(tables=2, block=8, cell=2)),
                Limits(exact=0, search=0, followers=3, effort=Effort(tables=2, block=8, cell=2)),
            ]
        )
    )
    return items, [Domain(tau, Curve.linear(tau)), STEPWISE], cached, limits


@settings(max_examples=150, deadline=None)
@given(batches(), st.booleans())
def test_every_plan_obeys_the_rules(batch: tuple[Items, list[Domain], Cached, Limits], shared: bool) -> None:
    items, domains, cached, limits = batch
    made = plan(items, domains, cached, limits, shared=shared)
    assignments = list(made)
    entries = {int(entry): place for place, entry in enumerate(cached.entry)}
    served: Counter[tuple[str, int]] = Counter()
    assert [a.index for a in assignments] == list(range(len(items)))
    assert sorted(a.position for a in assignments) == list(range(len(items)))
    for a in assignments:
        i = a.index
        if a.role == "source":
            assert (a.source, a.entry, a.similarity, a.fallback) == (None, None, None, None)
            continue
        assert items.reuse[i] != OFF
        assert (a.source is None) != (a.entry is None)
        if a.role == "duplicate":
            assert a.source is not None and a.source < i and a.fallback is None
            assert items.request[a.source] == items.request[i]
            assert list(items.request).index(items.request[i]) == a.source  # the first of them
            assert assignments[a.source].position < a.position
            continue
        assert a.similarity is not None and domains[items.domain[i]].tau - 1e-6 <= a.similarity <= 1.0
        if a.source is not None:
            assert shared and assignments[a.source].role == "source"
            assert items.domain[a.source] == items.domain[i]
            assert items.prompt[a.source] != items.prompt[i] or items.reuse[i] == FORCE
            assert assignments[a.source].position < a.position
            assert a.similarity == pytest.approx(float(items.embeddings[a.source] @ items.embeddings[i]), abs=1e-5)
            served["row", a.source] += 1
        else:
            assert a.entry is not None
            place = entries[a.entry]
            assert cached.domain[place] == items.domain[i]
            assert cached.prompt[place] != items.prompt[i] or items.reuse[i] == FORCE
            assert a.similarity == pytest.approx(float(cached.embeddings[place] @ items.embeddings[i]), abs=1e-5)
            served["entry", a.entry] += 1
        if a.fallback is not None:
            assert shared and assignments[a.fallback].role == "source"
            assert a.fallback not in (a.source, i) and items.domain[a.fallback] == items.domain[i]
            near = float(items.embeddings[a.fallback] @ items.embeddings[i])
            assert near >= domains[items.domain[i]].tau - 1e-5
    assert max(served.values(), default=0) <= limits.followers
    again = plan(items, domains, cached, limits, shared=shared)
    assert list(again) == assignments
    if shared and limits == Limits():  # nothing capped: arrival order is one of the plans
        assert plan_cost(made, items, domains) <= online_cost(items, domains, cached) + 1e-4


@settings(max_examples=60, deadline=None)
@given(batches())
def test_more_urgent_rows_come_first(batch: tuple[Items, list[Domain], Cached, Limits]) -> None:
    items, domains, cached, limits = batch
    made = plan(items, domains, cached, limits)
    waits_for = {a.source for a in made if a.source is not None}
    plain = [a for a in made if a.role == "source" and a.index not in waits_for]
    in_order = sorted(plain, key=lambda a: a.position)
    urgency = [int(items.priority[a.index]) for a in in_order]
    assert urgency == sorted(urgency, reverse=True)


def test_sources_with_many_followers_come_first_and_inherit_urgency() -> None:
    a, b = np.eye(2, dtype=np.float32)
    items = items_of(np.stack([a, a, b, b, b]), priority=[0, 0, 0, 0, 0])
    made = plan(items, [DOMAIN])
    order = sorted(range(5), key=lambda i: made[i].position)
    assert [made[i].role for i in order] == ["source", "source", "follower", "follower", "follower"]
    assert order[0] in (2, 3, 4) and set(order[2:4]) < {2, 3, 4}  # few clusters: all sources first
    urgent = plan(replace(items, priority=np.array([0, 9, 0, 0, 0])), [DOMAIN])
    source = urgent[1].source if urgent[1].source is not None else 1
    assert urgent[source].position == 0


def lower_bound(items: Items, domain: Domain) -> float:
    """The linear relaxation of uncapped facility location over all arcs, solved by HiGHS."""
    optimize = pytest.importorskip("scipy.optimize")
    sparse = pytest.importorskip("scipy.sparse")
    near = items.embeddings @ items.embeddings.T
    i, j = np.nonzero((near >= domain.tau - ROUNDING) & ~np.eye(len(items), dtype=bool))
    n, arcs = len(items), len(i)
    # Variables: y_j (open), x_ij. Each row is open or served once; served only by what is open.
    cost = np.concatenate([np.ones(n), domain.curve(np.minimum(near[i, j], 1.0))])
    once = sparse.coo_array((np.ones(n + arcs), (np.append(np.arange(n), i), np.arange(n + arcs))), shape=(n, n + arcs))
    rows = np.concatenate([np.arange(arcs), np.arange(arcs)])
    columns = np.concatenate([n + np.arange(arcs), j])
    opened = sparse.coo_array((np.repeat([1.0, -1.0], arcs), (rows, columns)), shape=(arcs, n + arcs))
    found = optimize.linprog(
        cost, A_ub=opened, b_ub=np.zeros(arcs), A_eq=once, b_eq=np.ones(n), bounds=(0, 1), method="highs"
    )
    assert found.status == 0
    return float(found.fun)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noise", [0.4, 0.7])
@pytest.mark.parametrize(("at_tau", "at_one"), [(0.8, 0.625), (0.556, 0.286)])
def test_cost_is_near_the_linear_bound(seed: int, noise: float, at_tau: float, at_one: float) -> None:
    items = items_of(vectors_of(120, 15, noise, seed))
    domain = Domain(0.65, Curve.linear(0.65, at_tau, at_one))
    bound = lower_bound(items, domain)
    cost = plan_cost(plan(items, [domain]), items, [domain])
    assert bound - 1e-4 <= cost <= 1.02 * bound
    assert cost <= online_cost(items, [domain]) + 1e-4


def test_local_search_helps_somewhere_and_never_hurts() -> None:
    better = 0
    for seed in range(12):
        items = items_of(vectors_of(150, 12, 0.6, seed))
        with_search = plan_cost(plan(items, [DOMAIN]), items, [DOMAIN])
        without = plan_cost(plan(items, [DOMAIN], limits=Limits(search=0)), items, [DOMAIN])
        assert with_search <= without + 1e-4
        better += with_search < without - 1e-4
    assert better > 0


def test_one_row_and_none() -> None:
    assert [a.role for a in plan(items_of(vectors_of(1, 1, 0.1, 0)), [DOMAIN])] == ["source"]
    assert list(plan(items_of(np.zeros((0, 16), np.float32)), [DOMAIN])) == []


def test_all_equal() -> None:
    vectors = np.tile(vectors_of(1, 1, 0.1, 0), (200, 1))
    made = plan(items_of(vectors), [DOMAIN])
    roles = Counter(a.role for a in made)
    assert roles["source"] == 4  # 64 followers each
    assert all(a.similarity == pytest.approx(1.0) for a in made if a.role == "follower")
    assert all(a.fallback is not None for a in made if a.role == "follower")


def test_all_unrelated() -> None:
    made = plan(items_of(np.eye(16, dtype=np.float32)), [DOMAIN])
    assert {a.role for a in made} == {"source"}


def test_tau_zero_lets_all_follow_and_tau_one_only_the_equal() -> None:
    vectors = np.abs(vectors_of(30, 30, 0.1, 3))
    everything = plan(items_of(vectors), [Domain(0.0, Curve.linear(0.0, 0.5, 0.1))])
    assert sum(a.role == "source" for a in everything) < 15
    twins = np.concatenate([vectors, vectors])
    made = plan(items_of(twins), [Domain(1.0, Curve.linear(1.0))])
    assert [a.source for a in made if a.role == "follower"] == [
        (a.index + 30) % 60 for a in made if a.role == "follower"
    ]
    assert sum(a.role == "follower" for a in made) == 30


def test_same_prompt_other_seed_follows_only_if_forced() -> None:
    vectors = np.tile(vectors_of(1, 1, 0.1, 0), (3, 1))
    items = items_of(vectors, prompt=[7, 7, 7])
    assert {a.role for a in plan(items, [DOMAIN])} == {"source"}
    forced = plan(replace(items, reuse=np.array([AUTO, AUTO, FORCE])), [DOMAIN])
    assert [a.role for a in forced] == ["source", "source", "follower"]


def test_many_seeds_of_a_prompt_do_not_hide_the_next_prompt() -> None:
    """300 seeds of each of two near prompts: the 64 nearest of each row would all be of its own prompt."""
    one = vectors_of(1, 1, 0.1, 0)
    two = one + 0.05 * vectors_of(1, 1, 0.1, 1)
    items = items_of(np.concatenate([np.repeat(one, 300, 0), np.repeat(two, 300, 0)]), prompt=[0] * 300 + [1] * 300)
    made = plan(items, [DOMAIN])
    assert sum(a.role == "follower" for a in made) > 500


def test_off_rows_serve_but_never_follow() -> None:
    vectors = np.tile(vectors_of(1, 1, 0.1, 0), (4, 1))
    made = plan(items_of(vectors, reuse=[AUTO, OFF, AUTO, OFF]), [DOMAIN])
    assert [a.role for a in made] == ["follower", "source", "follower", "source"]


def test_duplicates_point_to_the_first_even_if_it_follows() -> None:
    a, b = vectors_of(2, 2, 0.1, 0)
    near = a + 0.1 * b
    items = items_of(np.stack([a, near, near, near, near]), request=[0, 1, 1, 2, 1], prompt=[0, 1, 1, 1, 1])
    items = replace(items, reuse=np.array([OFF, AUTO, AUTO, AUTO, OFF]))
    made = plan(items, [DOMAIN])
    assert [(x.role, x.source) for x in made] == [
        ("source", None),
        ("follower", 0),
        ("duplicate", 1),
        ("follower", 0),
        ("source", None),
    ]


def test_no_row_follows_across_domains() -> None:
    vectors = np.tile(vectors_of(1, 1, 0.1, 0), (4, 1))
    made = plan(items_of(vectors, domain=[0, 1, 0, 1]), [DOMAIN, DOMAIN])
    for a in made:
        assert a.source is None or a.source % 2 == a.index % 2
    assert sum(a.role == "source" for a in made) == 2


def test_a_domain_without_semantic_reuse_links_equal_rows_and_nothing_else() -> None:
    vectors = np.tile(vectors_of(1, 1, 0.1, 0), (6, 1))
    items = items_of(vectors, domain=[0, 1, 0, 1, 0, 1], request=[0, 1, 2, 3, 0, 1], reuse=[AUTO, FORCE] * 3)
    held = Cached(np.array([42]), np.array([1]), np.array([999]), vectors[:1])
    domains = [DOMAIN, replace(DOMAIN, semantic=False)]
    made = plan(items, domains, held)
    assert [(a.role, a.source, a.entry) for a in made] == [
        ("source", None, None),
        ("source", None, None),
        ("follower", 0, None),
        ("source", None, None),
        ("duplicate", 0, None),
        ("duplicate", 1, None),
    ]
    assert all(a.fallback is None for a in made if a.index % 2)
    plain = [replace(domain, semantic=False) for domain in domains]
    assert online_cost(items, plain, held) == plan_cost(plan(items, plain, held), items, plain) == 4


def test_cached_entries_are_free_sources() -> None:
    vectors = vectors_of(20, 1, 0.05, 0)
    held = Cached(np.array([42]), np.array([0]), np.array([999]), vectors_of(20, 1, 0.05, 0)[:1])
    made = plan(items_of(vectors), [DOMAIN], held)
    assert {(a.role, a.entry, a.source) for a in made} == {("follower", 42, None)}
    assert plan_cost(made, items_of(vectors), [DOMAIN]) < 20 * 0.8


def test_request_that_is_cached_is_linked() -> None:
    vectors = vectors_of(2, 2, 0.1, 0)
    held = Cached(np.array([42]), np.array([0]), np.array([1]), vectors[1:], request=np.array([1]))
    made = plan(items_of(vectors), [DOMAIN], held)
    assert (made[1].role, made[1].entry, made[1].source) == ("duplicate", 42, None)


def test_only_the_cache_if_not_shared() -> None:
    vectors = np.tile(vectors_of(1, 1, 0.1, 0), (3, 1))
    assert {a.role for a in plan(items_of(vectors), [DOMAIN], shared=False)} == {"source"}
    held = Cached(np.array([5]), np.array([0]), np.array([99]), vectors[:1])
    assert {a.entry for a in plan(items_of(vectors), [DOMAIN], held, shared=False)} == {5}


def test_unshared_links_repetitions_only_if_asked() -> None:
    request = np.array([3, 1, 3, 3, 1])
    linked = unshared(request, link=True)
    assert [(a.role, a.source) for a in linked] == [
        ("source", None),
        ("source", None),
        ("duplicate", 0),
        ("duplicate", 0),
        ("duplicate", 1),
    ]
    assert {a.role for a in unshared(request, link=False)} == {"source"}


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_unusable_vector_names_its_row(value: float) -> None:
    vectors = vectors_of(5, 2, 0.1, 0)
    vectors[3] = value
    with pytest.raises(UnusableVector, match="row 4") as caught:
        plan(items_of(vectors), [DOMAIN])
    assert caught.value.index == 3


def test_large_domains_lose_little() -> None:
    """Small limits stand for large lists."""
    vectors = vectors_of(3000, 60, 0.15, 0)
    items = items_of(vectors)
    held = Cached(np.array([1, 2]), np.array([0, 0]), np.array([-1, -2]), vectors[:2])
    tables = plan(items, [DOMAIN], held, Limits(exact=1000))
    whole = plan(items, [DOMAIN], held)
    assert sorted(a.position for a in tables) == list(range(3000))
    served = Counter(a.entry for a in tables if a.entry is not None)
    assert served and max(served.values()) <= 64
    assert plan_cost(tables, items, [DOMAIN]) <= 1.02 * plan_cost(whole, items, [DOMAIN])
    (graph,) = tables.graphs
    assert (graph.domain, graph.rows, graph.entries) == (0, 3000, 2) and graph.arcs > 3000
    assert graph.recall is not None and 0.9 < graph.recall <= 1.0
    assert [graph.recall for graph in whole.graphs] == [1.0]


def test_an_election_is_nearly_as_good_as_one_after_the_other() -> None:
    for seed in range(4):
        items = items_of(vectors_of(600, 50, 0.5, seed))
        elected = plan_cost(plan(items, [DOMAIN], limits=Limits(search=0)), items, [DOMAIN])
        searched = plan_cost(plan(items, [DOMAIN]), items, [DOMAIN])
        assert searched - 1e-4 <= elected <= 1.02 * searched


def test_recall_is_none_where_there_is_nothing_to_find() -> None:
    made = plan(items_of(np.eye(64, dtype=np.float32)), [DOMAIN], limits=Limits(exact=10))
    assert [graph.recall for graph in made.graphs] == [None]
    assert unshared(np.arange(3), link=True).graphs == ()


@pytest.mark.parametrize("exact", [50_000, 100])
@pytest.mark.parametrize("rows", [4000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_giant_cluster_is_served_by_few(rows: int, exact: int) -> None:
    """Nearest neighbors alone would split it into as many clusters as neighbors are kept."""
    vectors = vectors_of(rows, 1, 0.02, 0)
    items = items_of(vectors)
    made = plan(items, [DOMAIN], limits=Limits(exact=exact, arcs=16, few_arcs=0, large_arcs=16))
    least = rows / 65 * (1 + 64 * 0.625)  # every source has as many followers as it may, all of them as near as can be
    assert least <= plan_cost(made, items, [DOMAIN]) <= 1.02 * least
    assert max(Counter(made.source[made.source >= 0].tolist()).values()) <= 64


def test_all_equal_among_many() -> None:
    vectors = np.tile(vectors_of(1, 1, 0.1, 0), (3000, 1))
    made = plan(items_of(vectors), [DOMAIN])
    assert int((made.role == ROLES.index("source")).sum()) <= 1.2 * 3000 / 65


def test_a_kind_of_difference_has_a_threshold_and_a_cost_of_its_own() -> None:
    """Four rows, all alike: slot 0 may differ for free, slot 1 must not, nor both; the last goes by similarity."""
    vectors = np.tile(vectors_of(1, 1, 0.1, 0), (4, 1))
    filling = np.array([[0, 0], [0, 1], [1, 0], [0, 0]], np.int32)
    slots = slots_of(np.array([0, 0, 0, -1]), filling, [[1, 2]])
    kinds = (Reuse(0.3, Curve(((0.3, 0.1),))), None)
    domain = Domain(0.65, Curve.linear(0.65), kinds=kinds)
    assert domain.lowest == 0.3
    made = plan(replace(items_of(vectors), slots=slots), [domain])
    assert made[0].source == 2 or made[2].source == 0
    assert (made[1].source, made[0].source) != (0, 1)
    far = vectors.copy()
    far[2] = unit(far[2] + 1.5 * np.roll(far[2], 3))
    assert 0.3 < far[0] @ far[2] < 0.65
    made = plan(replace(items_of(far), slots=slots), [domain])
    assert made[0].source == 2 or made[2].source == 0
    alone = plan(items_of(far), [domain])
    assert alone[2].role == "source" and 2 not in alone.source


def slots_of(template: np.ndarray, filling: np.ndarray, kind: list[list[int]], alike: float = 0.0) -> Slots:
    """Of templates whose slots' kinds are given as bits; several at once go by the general table (bit 2)."""
    measured = np.full(len(kind), alike, np.float32)
    return Slots(template.astype(np.int32), filling.astype(np.int32), np.array(kind, np.uint16), 4, measured)


def test_the_least_of_several_kinds_counts() -> None:
    cheap, dear = Reuse(0.3, Curve(((0.3, 0.1),))), Reuse(0.3, Curve(((0.3, 0.5),)))
    domain = Domain(0.65, Curve(((0.65, 0.7),)), kinds=(cheap, dear))
    m = np.array([0.9] * 5 + [0.5] * 5, np.float32)
    bits = np.array([0, 1, 2, 3, 1 | 2 | 4] * 2, np.uint16)
    np.testing.assert_allclose(domain.savings(m, bits), [0.3, 0.9, 0.5, 0.5, 0.3, 0.0, 0.9, 0.5, 0.5, 0.0], atol=1e-6)
    blind = replace(domain, kinds=())
    np.testing.assert_allclose(blind.savings(m, bits), [0.3] * 5 + [0.0] * 5, atol=1e-6)


def test_boilerplate_alone_is_no_reason_to_follow() -> None:
    """All pairs are alike; those of the template whose kinds are unknown must be more alike than its boilerplate."""
    vectors = vectors_of(40, 1, 0.1, 0)
    near = vectors @ vectors.T
    filling = np.stack([np.arange(40) % 2, np.arange(40)], axis=1)
    calibrated = slots_of(np.zeros(40), filling, [[0, 0]]).calibrated(vectors)
    (alike,) = calibrated.alike.tolist()
    assert np.quantile(near, 0.4) < alike < np.quantile(near, 0.6)
    made = plan(replace(items_of(vectors), slots=calibrated), [DOMAIN])
    follows = made.similarity[made.similarity == made.similarity]
    assert len(follows) > 10 and follows.min() >= alike
    free = plan(items_of(vectors), [DOMAIN])
    assert free.similarity[free.similarity == free.similarity].min() < alike
    # Where the kinds are known the model's tables for them decide.
    domain = replace(DOMAIN, kinds=(Reuse(0.65, DOMAIN.curve), Reuse(0.65, DOMAIN.curve)))
    known = plan(replace(items_of(vectors), slots=replace(calibrated, kind=np.array([[1, 2]], np.uint16))), [domain])
    np.testing.assert_array_equal(known.source, plan(items_of(vectors), [DOMAIN]).source)


def test_entries_of_the_cache_have_slots_too() -> None:
    """Entry 7 differs from the row in what must not differ; entry 8, as near, in what may."""
    vectors = np.tile(vectors_of(1, 1, 0.1, 0), (2, 1))
    domain = Domain(0.65, Curve.linear(0.65), kinds=(Reuse(0.3, Curve(((0.3, 0.1),))), None))
    slots = slots_of(np.zeros(3), np.array([[0, 0], [0, 1], [1, 0]]), [[1, 2]])
    items = replace(items_of(vectors[:1]), slots=slots[np.array([0])])
    cached = Cached(np.array([7, 8]), np.array([0, 0]), np.array([1, 2]), vectors, slots=slots[np.array([1, 2])])
    made = plan(items, [domain], cached)
    assert (made[0].role, made[0].entry) == ("follower", 8)
    assert plan_cost(made, items, [domain], cached) == pytest.approx(0.1, abs=1e-5)
    blind = replace(cached, slots=None)  # what an entry's prompt holds is unknown: similarity decides
    made = plan(items, [domain], blind)
    assert plan_cost(made, items, [domain], blind) == pytest.approx(0.625, abs=1e-5)
    assert plan(items, [domain], Cached(*(column[:1] for column in (cached.entry, cached.domain, cached.prompt, vectors)),
                                        slots=slots[np.array([1])]))[0].role == "source"  # fmt: skip


def unit(vector: np.ndarray) -> np.ndarray:
    return np.asarray(vector / np.linalg.norm(vector), np.float32)


def test_vectors_of_another_length_are_made_unit() -> None:
    vectors = vectors_of(50, 5, 0.3, 0)
    scaled = vectors * np.linspace(0.1, 9, 50, dtype=np.float32)[:, None]
    before = scaled.copy()
    made = plan(items_of(scaled), [DOMAIN])
    np.testing.assert_array_equal(scaled, before)
    np.testing.assert_array_equal(made.source, plan(items_of(vectors), [DOMAIN]).source)


def test_dense_rows_are_cut_down_without_losing_the_nearest() -> None:
    vectors = vectors_of(1200, 1, 0.1, 5)
    made = plan(items_of(vectors), [DOMAIN], limits=Limits(arcs=8, few_arcs=0))
    near = vectors @ vectors.T
    sources = [a.index for a in made if a.role == "source"]
    followers = [a for a in made if a.role == "follower"]
    assert len(followers) > 600
    for a in followers[:50]:
        assert a.similarity == pytest.approx(float(near[a.index, a.source]), abs=1e-5)
    nearer = [a.similarity > np.median(near[a.index, sources]) for a in followers if a.similarity is not None]
    assert np.mean(nearer) > 0.9


def test_plan_is_a_sequence() -> None:
    made = plan(items_of(vectors_of(10, 2, 0.1, 0)), [DOMAIN])
    assert isinstance(made, Plan) and made[-1] == list(made)[9] and made[2:4] == list(made)[2:4]
    with pytest.raises(IndexError):
        made[10]
    assert all(ROLES[role] == a.role for role, a in zip(made.role, made, strict=True))


def test_curves() -> None:
    linear = Curve.linear(0.6, 0.8, 0.4)
    np.testing.assert_allclose(linear(np.array([0.6, 0.8, 1.0])), [0.8, 0.6, 0.4], rtol=1e-6)
    steps = Curve.of_boundaries([[0.75, 6, 6], [0.85, 8, 10]], 20, Price(region=0.5))
    np.testing.assert_allclose(steps(np.array([0.75, 0.84, 0.85, 1.0])), [0.7, 0.7, 0.55, 0.55], rtol=1e-6)
    # Of 20 steps and 2 steps' time beside, 3 where latents are fetched: (20 - 6 + 3) / 22.
    priced = Curve.of_boundaries([[0.75, 6, 6], [0.85, 8, 10]], 20, Price(0.5, beside=2.0, beside_reuse=3.0))
    np.testing.assert_allclose(priced(np.array([0.75, 0.85])), [17 / 22, 14 / 22], rtol=1e-6)
    assert Curve.of_boundaries([[0.75, 1, 1]], 20, Price(beside_reuse=5.0))(np.array([0.8])) == 1.0
    for points in [(), ((0.5, 0.5), (0.4, 0.4)), ((0.5, 0.5), (0.6, 0.7)), ((0.5, 1.5),), ((float("nan"), 0.5),)]:
        with pytest.raises(PlanInputError, match="cost curve"):
            Curve(points)


@pytest.mark.parametrize("tau", [-0.1, 1.1, float("nan")])
def test_tau_out_of_range(tau: float) -> None:
    with pytest.raises(PlanInputError, match="tau"):
        Domain(tau, Curve.linear(0.5))


def test_arrays_that_do_not_fit() -> None:
    items = items_of(vectors_of(4, 2, 0.1, 0))
    for wrong, said in [
        (replace(items, prompt=np.zeros(3, np.int64)), "items.prompt has 3 rows"),
        (replace(items, domain=np.array([0, 0, 0, 1])), "items.domain"),
        (replace(items, reuse=np.array([0, 0, 0, 7])), "items.reuse"),
        (replace(items, embeddings=np.ones(4, np.float32)), "items.embeddings"),
    ]:
        with pytest.raises(PlanInputError, match=said):
            plan(wrong, [DOMAIN])
    held = Cached(np.array([1]), np.array([0]), np.array([9]), np.ones((1, 8), np.float32))
    with pytest.raises(PlanInputError, match="another embedding space"):
        plan(items, [DOMAIN], held)
