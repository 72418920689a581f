"""The built-in model's world: scenes, captions, pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from chorus_batch.chorus.tiny.captions import caption, plain_caption
from chorus_batch.chorus.tiny.codec import LinearCodec
from chorus_batch.chorus.tiny.dataset import draw_batch
from chorus_batch.chorus.tiny.decoder import SharpCodec
from chorus_batch.chorus.tiny.render import place, render, render_with_cover
from chorus_batch.chorus.tiny.world import (
    COLOURS,
    SHAPES,
    Curriculum,
    Neighbour,
    Scene,
    draw_scenes,
    is_held_out,
)

WEIGHTS = Path(__file__).parents[3] / "chorus" / "tiny" / "weights"


@pytest.fixture(scope="module")
def codec() -> SharpCodec:
    """The shipped linear codec."""
    return SharpCodec(LinearCodec(WEIGHTS / "codec.safetensors", "cpu"))


def test_a_scene_must_be_of_this_world() -> None:
    with pytest.raises(ValueError, match="'pentagon' is not one of circle"):
        Scene("red", "pentagon", "left", "black")


def test_an_object_cannot_hide_in_its_background() -> None:
    with pytest.raises(ValueError, match="cannot be seen"):
        Scene("blue", "circle", "left", "blue")


def test_rings_and_stripes_may_come_on_top() -> None:
    scenes = draw_scenes(4000, np.random.default_rng(5), Curriculum(textured=0.4, star=0.2, ring=0.4, striped=0.2))

    def share(attribute: str, value: str) -> float:
        return float(np.mean([getattr(scene, attribute) == value for scene in scenes]))

    assert share("shape", "star") == pytest.approx(0.2, abs=0.03)
    assert share("shape", "ring") == pytest.approx(0.4 + 0.4 / 4, abs=0.03)
    assert share("texture", "striped") == pytest.approx(0.2 + 0.4 / 2, abs=0.03)
    assert share("texture", "plain") == pytest.approx(0.4, abs=0.03)


def test_held_out_pairs_are_never_drawn_or_always() -> None:
    rng = np.random.default_rng(0)
    assert not any(is_held_out(s.colour, s.shape) for s in draw_scenes(400, rng))
    held_out = draw_scenes(50, rng, Curriculum(held_out=True))
    assert {(s.colour, s.shape) for s in held_out} == {(c, s) for c in COLOURS for s in SHAPES if is_held_out(c, s)}


def test_every_shape_and_every_colour_is_drawn() -> None:
    scenes = draw_scenes(400, np.random.default_rng(0))
    assert {s.shape for s in scenes} == set(SHAPES)
    assert {s.colour for s in scenes} == set(COLOURS)


def test_a_plain_caption_says_everything() -> None:
    scene = Scene("red", "star", "bounce", "white", "striped", "large", "checkered", Neighbour("blue", "square"))
    assert plain_caption(scene) == (
        "a large striped red star next to a small blue square bounces over a checkered white background"
    )


def test_captions_name_what_cannot_be_guessed() -> None:
    rng = np.random.default_rng(1)
    for scene in draw_scenes(300, rng):
        text = caption(scene, rng, held_out=bool(rng.random() < 0.5))
        assert scene.colour in text
        assert scene.background in text
        assert scene.neighbour is None or f"small {scene.neighbour.colour}" in text


def test_held_out_wordings_do_not_occur_in_training() -> None:
    rng = np.random.default_rng(2)
    texts = [caption(s, rng) for s in draw_scenes(500, rng)]
    assert not any("backdrop" in t or "in this clip" in t for t in texts)
    assert len(set(texts)) > 490


def test_word_dropout_only_drops_words() -> None:
    scene = Scene("red", "star", "left", "white")
    whole = caption(scene, np.random.default_rng(5))
    dropped = caption(scene, np.random.default_rng(5), drop_words=1.0).split()
    remaining = iter(whole.split())
    assert all(word in remaining for word in dropped)


@pytest.mark.parametrize("canvas", [64, 128])
def test_objects_stay_inside_the_canvas(canvas: int) -> None:
    rng = np.random.default_rng(3)
    scenes, placement = place(draw_scenes(60, rng), rng, canvas)
    video, cover = render_with_cover(scenes, placement, canvas)
    assert video.shape == (60, 3, 9, canvas, canvas)
    assert float(video.min()) >= -1
    assert float(video.max()) <= 1
    assert float(cover[..., 0, :].max()) == 0
    assert float(cover[..., :, -1].max()) == 0
    assert float(cover.amax(dim=(1, 3, 4)).min()) == 1


def test_a_neighbour_is_clear_of_the_object_or_dropped() -> None:
    rng = np.random.default_rng(4)
    scenes, placement = place(draw_scenes(200, rng, Curriculum(neighbour=1.0)), rng, 64)
    with_neighbour = [i for i, s in enumerate(scenes) if s.neighbour is not None]
    assert 20 < len(with_neighbour) < 200
    assert all((placement.near_r[i] > 0) == (i in with_neighbour) for i in range(200))
    for i in with_neighbour:
        away = np.hypot(placement.x[i] - placement.near_x[i], placement.y[i] - placement.near_y[i])
        assert (away > placement.r[i] * 0.85 + placement.near_r[i]).all()


def test_the_same_seed_gives_the_same_batch(codec: SharpCodec) -> None:
    first, second, other = (draw_batch(codec, 3, 64, (7, 0, step)) for step in (1, 1, 2))
    assert first.captions == second.captions
    assert torch.equal(first.latents, second.latents)
    assert not torch.equal(first.latents, other.latents)
    assert first.latents.shape == (3, 16, 3, 16, 16)
    assert first.cover.shape == (3, 1, 3, 16, 16)


def test_moving_left_moves_left() -> None:
    rng = np.random.default_rng(6)
    scenes, placement = place([Scene("red", "circle", "left", "black")], rng, 64)
    red = render(scenes, placement, 64)[0, 0] > 0
    columns = [float(frame.nonzero()[:, 1].float().mean()) for frame in red]
    assert columns == sorted(columns, reverse=True)
    assert columns[0] - columns[-1] > 9
