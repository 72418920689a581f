"""Nearest neighbors among many rows: what is found, and that the fast paths say what the plain ones do."""

from __future__ import annotations

import numpy as np
import pytest

from chorus_batch.jobs.nearest import Hunt, Points, ascending, exact
from chorus_batch.jobs.neighbour_tables import Effort, approximate, recall
from chorus_batch.jobs.processors import taken


def topics(count: int, of: int, noise: float, seed: int) -> np.ndarray:
    """Vectors around `of` centers of their own."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(99).standard_normal((of, 48))
    vectors = centers[rng.integers(of, size=count)] + noise * rng.standard_normal((count, 48))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def points(vectors: np.ndarray, prompt: np.ndarray | None = None) -> Points:
    return Points(vectors, np.arange(len(vectors)) if prompt is None else prompt)


@pytest.mark.parametrize("own", [True, False])
def test_most_nearest_neighbors_are_found(own: bool) -> None:
    rows = points(topics(6000, 300, 0.8, 1))
    others = rows if own else points(topics(3000, 300, 0.8, 2), -np.arange(1, 3001))
    hunt = Hunt(rows, np.zeros(6000, bool), others, own, 0.3, 16, 64, repeated=False)
    found = approximate(hunt, Effort(tables=6 if own else 10, block=64))
    share = recall(hunt, found)
    assert share is not None and 0.9 <= share < 1.0
    whole = exact(hunt)
    right = found.similarity[:, 0] >= whole.similarity[:, 0] - 1e-5
    assert abs(float(right.mean()) - share) < 0.03  # the sample tells of all
    # What was found is what it says it is, nearest first, each once, and never the row itself.
    row, rank = np.nonzero(found.point >= 0)
    near = np.einsum("pd,pd->p", rows.vectors[row], others.vectors[found.point[row, rank]])
    np.testing.assert_allclose(found.similarity[row, rank], near, atol=1e-5)
    assert (np.diff(found.similarity, axis=1) <= 0).all()
    pairs = np.stack([row, found.point[row, rank]])
    assert np.unique(pairs, axis=1).shape == pairs.shape
    assert not (own and (pairs[0] == pairs[1]).any())


def test_neighbors_of_neighbors_find_what_the_tables_missed() -> None:
    rows = points(topics(6000, 300, 0.8, 1))
    hunt = Hunt(rows, np.zeros(6000, bool), rows, True, 0.3, 16, 64, repeated=False)
    shares = [recall(hunt, approximate(hunt, Effort(tables=3, block=64, passes=passes))) for passes in (0, 1, 2)]
    assert shares == sorted(shares) and shares[0] < shares[2]


def test_pairs_obey_the_rules_as_blocks_do() -> None:
    rng = np.random.default_rng(0)
    rows = points(topics(40, 4, 0.5, 3), rng.integers(12, size=40))
    hunt = Hunt(rows, rng.random(40) < 0.3, rows, True, 0.0, 8, 64, repeated=True)
    first, second = (side.reshape(-1) for side in np.indices((40, 40)))
    block = hunt.compared(np.arange(40), None)
    np.testing.assert_allclose(hunt.paired(first, second), block.reshape(-1), atol=1e-6)
    some = rng.permutation(40)[:17]
    np.testing.assert_allclose(hunt.compared(some, some), block[np.ix_(some, some)], atol=1e-6)
    np.testing.assert_allclose(hunt.compared(some, some.copy()), block[np.ix_(some, some)], atol=1e-6)


def test_stable_order_and_places_in_parts() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(1000, size=1_200_003).astype(np.int32)
    order = ascending(codes)
    np.testing.assert_array_equal(order, np.argsort(codes, kind="stable"))
    np.testing.assert_array_equal(taken(codes, order), codes[order])
    assert len(ascending(codes[:0])) == len(taken(codes, order[:0])) == 0
