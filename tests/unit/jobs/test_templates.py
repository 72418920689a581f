"""Templates in lists of prompts, and what their slots say about a pair."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from chorus_batch.jobs.templates import Slots, find

COLORS = ("red", "blue", "forest green", "matte black", "pink", "gold")
PLACES = ("on a beach", "in a studio", "in the snow", "at night")
CATALOG = [
    f"Product video of a {color} ceramic mug standing {place}, slow camera turn, photorealistic."
    for color, place in itertools.product(COLORS, PLACES)
]
OTHERS = [f"{word} runs and jumps over something else {n}" for n, word in enumerate("abcdefghijklmnopqrstuvwxyz")]


def told(pairs: Sequence[tuple[str, str]]) -> list[str | None]:
    """Only the place decides whether the background differs."""
    return [
        "background" if one.split("standing")[0] == other.split("standing")[0] else "attribute" for one, other in pairs
    ]


def test_a_catalog_is_found_with_its_slots() -> None:
    found, slots = find([*OTHERS, *CATALOG], ["attribute", "background"], told)
    (template,) = found
    assert template.prompts == len(CATALOG) and template.kinds == ("attribute", "background")
    assert str(template) == (
        "Product video of {attribute} ceramic mug standing {background}, slow camera turn, photorealistic."
    )
    assert slots is not None
    assert set(slots.template[: len(OTHERS)]) == {-1} and set(slots.template[len(OTHERS) :]) == {0}
    base = len(OTHERS)
    one = np.full(4, base, np.int32)
    other = np.array([base + 1, base + len(PLACES), base + len(PLACES) + 1, 0], np.int32)
    several = 1 | 2 | 4  # of this pair both slots differ; "several" has no table of its own
    assert slots.kinds(one, other).tolist() == [2, 1, several, 0]
    assert slots.several == 4 and slots.least(one, other).tolist() == [0.0] * 4
    rows = slots[np.array([base, 0])]
    assert rows.template.tolist() == [0, -1]


def test_a_slot_whose_kind_is_not_agreed_on_or_not_known_has_none() -> None:
    answers = itertools.cycle(["attribute", "camera"])
    found, slots = find(CATALOG, ["attribute"], lambda pairs: [next(answers) for _ in pairs])
    assert found[0].kinds == (None, None) and slots is not None and (slots.kind == 0).all()
    found, slots = find(CATALOG, ["attribute"], lambda pairs: [None] * len(pairs))
    assert found[0].kinds == (None, None)
    found, slots = find(CATALOG, ["camera"], told)
    # Known, but without tables of their own: the general one is theirs.
    assert found[0].kinds == ("attribute", "background") and slots is not None and (slots.kind == 2).all()
    assert slots.kinds(np.array([0]), np.array([1])).tolist() == [2]


def test_others_are_fitted_into_the_templates() -> None:
    others = [CATALOG[0].replace("red", "green"), "Something else", CATALOG[5]]
    _, slots = find(CATALOG, ["attribute", "background"], told, others)
    assert slots is not None
    assert slots.template[len(CATALOG) :].tolist() == [0, -1, 0]
    entry, same = len(CATALOG), len(CATALOG) + 2
    assert slots.kinds(np.array([0, 5]), np.array([entry, same])).tolist() == [1, 0]  # only the color; nothing
    assert find(OTHERS, ["attribute"], told, CATALOG) == ((), None)


def test_similarity_by_the_template_alone() -> None:
    _, slots = find([*OTHERS, *CATALOG], ["attribute", "background"], told, ["Something else"])
    assert slots is not None
    color, place = (np.eye(12)[np.arange(24) // 4], np.eye(12)[6 + np.arange(24) % 4])
    vectors = np.zeros((len(OTHERS) + 24, 12), np.float32)
    vectors[len(OTHERS) :] = (color + place + 2 * np.eye(12)[10]) / 6**0.5  # boilerplate: 4 / 6 of the product
    measured = slots.calibrated(vectors)
    np.testing.assert_allclose(measured.alike, [4 / 6], atol=1e-6)
    one, other = np.array([len(OTHERS), 0]), np.array([len(OTHERS) + 1, 1])
    np.testing.assert_allclose(measured.least(one, other), [4 / 6, 0], atol=1e-6)


def test_prompts_without_boilerplate_have_no_template() -> None:
    for prompts in ([], ["one"], OTHERS, ["the same"] * 50, [f"A dog {n}" for n in range(50)]):
        assert find(prompts, ["attribute"], told) == ((), None)


def test_signs_that_mean_something_to_a_pattern_stand_for_themselves() -> None:
    prompts = [f"What (really) costs 3.50$ [in {city}] today? A film + a {thing} film" for city, thing in
               itertools.product(["Rome", "Bern", "Oslo", "Kiel", "Graz"], ["long", "short", "good", "bad", "new"])]  # fmt: skip
    found, slots = find(prompts, ["background"], lambda pairs: ["background"] * len(pairs))
    assert found[0].prompts == 25 and slots is not None and slots.kinds(np.array([0]), np.array([1])).tolist() == [1]
    assert isinstance(slots, Slots)
