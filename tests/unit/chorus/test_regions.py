"""Regions on random masks: law 6 (base <= edit <= see), dilation against brute force, pooling against a loop."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus_batch.chorus.errors import RegionError
from chorus_batch.chorus.regions import NoRegion, Reason, Regions, RegionSettings, build, complement, dilate, pool

radii = st.integers(0, 3)
shares = st.sampled_from([0.0, 0.02, 0.1, 0.5, 0.97, 1.0])
sides = st.integers(1, 7)
quick = settings(max_examples=60)


@st.composite
def masks(draw: st.DrawFn) -> torch.Tensor:
    grid = draw(st.tuples(st.integers(1, 4), sides, sides))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return torch.from_numpy(rng.random(grid) < draw(shares))


@st.composite
def radius_settings(draw: st.DrawFn, largest_share: float | None = None) -> RegionSettings:
    edit_spatial, edit_temporal = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    return RegionSettings(
        edit_spatial=edit_spatial,
        edit_temporal=edit_temporal,
        see_spatial=edit_spatial + draw(st.integers(1, 2)),
        see_temporal=edit_temporal + draw(st.integers(0, 2)),
        largest_share=largest_share or draw(st.floats(0.05, 1)),
    )


def _inside(small: torch.Tensor, large: torch.Tensor) -> bool:
    return not bool((small & ~large).any())


@quick
@given(masks(), radii, radii)
def test_dilation_equals_brute_force(mask: torch.Tensor, temporal: int, spatial: int) -> None:
    expected = torch.zeros_like(mask)
    for t, y, x in mask.nonzero().tolist():
        expected[
            max(t - temporal, 0) : t + temporal + 1,
            max(y - spatial, 0) : y + spatial + 1,
            max(x - spatial, 0) : x + spatial + 1,
        ] = True
    before = mask.clone()
    assert torch.equal(dilate(mask, temporal, spatial), expected)
    assert torch.equal(mask, before)


@quick
@given(masks(), radii, radii)
def test_dilation_grows_with_mask_and_radius(mask: torch.Tensor, temporal: int, spatial: int) -> None:
    assert torch.equal(dilate(mask, 0, 0), mask)
    grown = dilate(mask, temporal, spatial)
    assert _inside(mask, grown)
    assert _inside(grown, dilate(mask, temporal + 1, spatial))
    assert _inside(grown, dilate(mask, temporal, spatial + 1))
    assert torch.equal(dilate(dilate(mask, temporal, spatial), 1, 1), dilate(mask, temporal + 1, spatial + 1))


@quick
@given(masks(), radius_settings())
def test_regions_lie_inside_each_other_or_say_why_not(base: torch.Tensor, radius: RegionSettings) -> None:
    made = build(base, radius)
    see = dilate(base, radius.see_temporal, radius.see_spatial)
    share = float(see.float().mean())
    if isinstance(made, Regions):
        assert torch.equal(made.base, base)
        assert _inside(made.base, made.edit)
        assert _inside(made.edit, made.see)
        assert made.share == pytest.approx(share)
        assert 0 < made.share <= radius.largest_share
    elif made.reason is Reason.empty:
        assert not base.any()
        assert made.share == 0
    else:
        assert made.share == pytest.approx(share)
        assert made.share > radius.largest_share


@quick
@given(masks(), radius_settings(largest_share=1.0), st.integers(0, 2**32 - 1))
def test_a_larger_base_has_larger_regions(base: torch.Tensor, radius: RegionSettings, seed: int) -> None:
    base.view(-1)[0] = True
    larger = base | torch.from_numpy(np.random.default_rng(seed).random(tuple(base.shape)) < 0.2)
    small, large = build(base, radius), build(larger, radius)
    assert isinstance(small, Regions)
    assert isinstance(large, Regions)
    assert _inside(small.edit, large.edit)
    assert _inside(small.see, large.see)
    assert small.share <= large.share


@quick
@given(st.integers(0, 4), sides, sides, st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32 - 1), shares)
def test_pooling_equals_a_loop(groups: int, h: int, w: int, high: int, wide: int, seed: int, share: float) -> None:
    pixels = torch.from_numpy(np.random.default_rng(seed).random((4 * groups + 1, h * high, w * wide)) < share / 4)
    expected = torch.zeros(groups + 1, h, w, dtype=torch.bool)
    for frame, y, x in pixels.nonzero().tolist():
        expected[(frame + 3) // 4, y // high, x // wide] = True
    assert torch.equal(pool(pixels, (high, wide)), expected)


@quick
@given(masks())
def test_background_and_objects_share_no_token_and_leave_none(objects: torch.Tensor) -> None:
    background = complement(objects)
    assert not bool((background & objects).any())
    assert bool((background | objects).all())


def test_a_region_by_hand() -> None:
    base = torch.zeros(3, 7, 9, dtype=torch.bool)
    base[1, 3, 4] = True
    made = build(base, RegionSettings(edit_spatial=1, edit_temporal=0, see_spatial=2, see_temporal=1))
    assert isinstance(made, Regions)
    assert [int(made.edit[t].sum()) for t in range(3)] == [0, 9, 0]
    assert [int(made.see[t].sum()) for t in range(3)] == [25, 25, 25]
    assert made.share == 75 / 189


def test_the_region_of_a_whole_grid_can_be_asked_for() -> None:
    whole = torch.ones(2, 3, 3, dtype=torch.bool)
    assert build(whole, RegionSettings()) == NoRegion(Reason.too_large, 1.0)
    made = build(whole, RegionSettings(largest_share=1.0))
    assert isinstance(made, Regions)
    assert made.share == 1.0


def test_the_digest_names_the_shape_and_every_bit_of_every_mask() -> None:
    none, some = torch.zeros(2, 2, 4, dtype=torch.bool), torch.zeros(2, 2, 4, dtype=torch.bool)
    some[1, 1, 3] = True
    every = [
        Regions(none, none, none),
        Regions(none, none, some),
        Regions(none, some, some),
        Regions(some, some, some),
        Regions(*(m.reshape(2, 4, 2) for m in (some, some, some))),
        Regions(*(m.flip(0) for m in (some, some, some))),
    ]
    digests = [made.digest for made in every]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 64 for digest in digests)
    assert Regions(none.clone(), some.clone(), some.clone()).digest == digests[2]


NONE = torch.zeros(2, 3, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("base", "edit", "see", "message"),
    [
        (~NONE, NONE, NONE, "inside"),
        (NONE, ~NONE, NONE, "inside"),
        (NONE, NONE[:1], NONE, "edit is"),
        (NONE, NONE, NONE.transpose(0, 1), "see is"),
        (NONE.float(), NONE, NONE, "base must be bool"),
        (NONE, NONE, NONE.int(), "see must be bool"),
        (NONE[0], NONE[0], NONE[0], "three dimensions"),
        (NONE[:0], NONE[:0], NONE[:0], "three dimensions"),
    ],
)
def test_wrong_masks_are_refused(base: torch.Tensor, edit: torch.Tensor, see: torch.Tensor, message: str) -> None:
    with pytest.raises(RegionError, match=message) as caught:
        Regions(base, edit, see)
    assert caught.value.code == "region"


@pytest.mark.parametrize(
    "change",
    [
        {"edit_spatial": -1},
        {"edit_spatial": 2},
        {"see_spatial": 1},
        {"see_spatial": 2.0},
        {"edit_temporal": 1},
        {"see_temporal": -1},
        {"largest_share": 0.0},
        {"largest_share": 1.01},
        {"largest_share": float("nan")},
    ],
)
def test_wrong_settings_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(RegionError, match="regions: "):
        RegionSettings(**change)  # type: ignore[arg-type]


def test_masks_that_do_not_fit_the_grid_are_refused() -> None:
    pixels = torch.zeros(5, 32, 48, dtype=torch.bool)
    assert pool(pixels, (16, 16)).shape == (2, 2, 3)
    for wrong, tokens in ((pixels[:4], (16, 16)), (pixels, (24, 16)), (pixels, (16, 20)), (pixels, (0, 16))):
        with pytest.raises(RegionError):
            pool(wrong, tokens)
    for act in (
        lambda m: pool(m, (16, 16)),
        lambda m: dilate(m, 1, 1),
        complement,
        lambda m: build(m, RegionSettings()),
    ):
        with pytest.raises(RegionError, match="bool"):
            act(pixels.float())
    with pytest.raises(RegionError, match="negative"):
        dilate(pixels, -1, 0)
