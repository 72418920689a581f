"""The segmenter that looks at the video: tiny models of transformers' own classes with random weights, from folders."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chorus_batch.chorus import grounded
from chorus_batch.chorus.differ import Difference, Kind, LexicalDiffer, Scope
from chorus_batch.chorus.errors import WeightsError
from chorus_batch.chorus.evidence import Evidence
from chorus_batch.chorus.grounded import GroundedSegmenter, phrases
from chorus_batch.chorus.regions import pool
from chorus_batch.chorus.segment import EvidenceSegmenter, Source, Video

PROMPT = "A Spotted  dog runs to a ball"
DIFFERENCE = Difference(Kind.attribute, Scope.object, "Spotted  dog", "black dog", ((2, 14),), ((2, 7),))
# Not square, and no multiple of what either model works on.
FRAMES, HEIGHT, WIDTH, TOKEN = 9, 32, 48, 2
GRID = (3, HEIGHT // TOKEN, WIDTH // TOKEN)

Folders = tuple[Path, Path]


def video(seed: int = 0, still: slice = slice(0, 0)) -> Video:
    frames = np.random.default_rng(seed).integers(0, 256, (FRAMES, HEIGHT, WIDTH, 3), dtype=np.uint8)
    frames[still] = 0
    return Video(frames, GRID)


def source(made: Video | None) -> Source:
    return Source(PROMPT, None, lambda: made)


@pytest.fixture(scope="module")
def segmenter(grounded_folders: Folders) -> GroundedSegmenter:
    return GroundedSegmenter(*grounded_folders)


def test_a_region_lies_on_the_token_grid_and_comes_again(grounded_folders: Folders) -> None:
    first, second = (GroundedSegmenter(*grounded_folders).region(source(video()), DIFFERENCE) for _ in range(2))
    assert first is not None and second is not None
    assert (tuple(first.shape), first.dtype) == (GRID, torch.bool)
    assert 0 < int(first.sum()) < first.numel()
    assert torch.equal(first, second)


def test_pictures_are_prepared_by_what_the_extra_installs_or_by_pillow(grounded_folders: Folders) -> None:
    config = json.loads((grounded_folders[0] / "processor_config.json").read_text())
    assert config["image_processor"]["image_processor_type"] == "GroundingDinoImageProcessor"  # as in the released ones
    _, processor, _ = GroundedSegmenter(*grounded_folders)._models()
    wanted = "GroundingDinoImageProcessor" if find_spec("torchvision") else "GroundingDinoImageProcessorPil"
    assert type(processor.image_processor).__name__ == wanted


def test_another_video_has_another_region(segmenter: GroundedSegmenter) -> None:
    first, second = (segmenter.region(source(video(seed)), DIFFERENCE) for seed in (0, 1))
    assert first is not None and second is not None and not torch.equal(first, second)


def test_the_background_is_what_no_object_covers(segmenter: GroundedSegmenter) -> None:
    background = replace(DIFFERENCE, kind=Kind.background, scope=Scope.background)
    objects, around = (segmenter.region(source(video()), each) for each in (DIFFERENCE, background))
    assert objects is not None and around is not None and torch.equal(around, ~objects)


def test_boxes_lie_in_the_picture_best_first(grounded_folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    segmenter = GroundedSegmenter(*grounded_folders, threshold=0.0)  # all boxes that the model has to offer
    boxes = segmenter._boxes(video().frames[[0, 1, 5]], "spotted dog.")
    assert len(boxes) == 3
    for each in boxes:
        assert len(each) == 2
        assert bool((each >= 0).all()) and bool((each <= torch.tensor([WIDTH, HEIGHT, WIDTH, HEIGHT])).all())
        assert bool((each[:, :2] <= each[:, 2:]).all())
    # Pictures are looked at together, but each for itself.
    (alone,) = segmenter._boxes(video().frames[[1]], "spotted dog.")
    torch.testing.assert_close(boxes[1], alone, rtol=0, atol=1e-3)
    monkeypatch.setattr(grounded, "MOST", 1)
    (best,) = segmenter._boxes(video().frames[[1]], "spotted dog.")
    assert torch.equal(best, alone[:1])


def test_an_object_is_followed_inside_its_group_alone(segmenter: GroundedSegmenter) -> None:
    whole = segmenter.region(source(video()), DIFFERENCE)
    changed = segmenter.region(source(video(still=slice(6, 9))), DIFFERENCE)
    assert whole is not None and changed is not None
    assert torch.equal(whole[:2], changed[:2]) and not torch.equal(whole[2], changed[2])


def test_nothing_found_is_no_region(grounded_folders: Folders) -> None:
    # No score exceeds 1.
    strict = GroundedSegmenter(*grounded_folders, threshold=1.0)
    assert strict.region(source(video()), DIFFERENCE) is None
    background = replace(DIFFERENCE, kind=Kind.background, scope=Scope.background)
    assert strict.region(source(video()), background) is None


def test_a_group_without_a_find_takes_its_neighbours(
    segmenter: GroundedSegmenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = segmenter._boxes

    def finds_in_the_second_alone(pictures: npt.NDArray[np.uint8], text: str) -> list[torch.Tensor]:
        found = find(pictures, text)
        return [found[0][:0], found[1], found[2][:0]]

    whole = segmenter.region(source(video()), DIFFERENCE)
    monkeypatch.setattr(segmenter, "_boxes", finds_in_the_second_alone)
    region = segmenter.region(source(video()), DIFFERENCE)
    assert whole is not None and region is not None
    assert torch.equal(region[1], whole[1])
    assert torch.equal(region[0], region[1]) and torch.equal(region[2], region[1])


def test_what_dino_is_asked() -> None:
    assert phrases(PROMPT, DIFFERENCE) == "spotted dog."
    assert phrases(PROMPT, replace(DIFFERENCE, source_spans=((2, 14), (25, 29)))) == "spotted dog. ball."
    # Of a differ's own finding.
    prompt = "A Red circle moves left over a gray background"
    difference = LexicalDiffer().compare(prompt, "A blue circle moves left over a gray background")
    assert phrases(prompt, difference) == "red circle."


def test_dino_reads_the_phrase(segmenter: GroundedSegmenter) -> None:
    assert segmenter.region(source(video()), DIFFERENCE) is not None
    assert segmenter._loaded is not None
    model, tokens = segmenter._loaded[0], []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: tokens.append(kwargs["input_ids"].tolist()), with_kwargs=True
    )
    try:
        segmenter.region(source(video()), DIFFERENCE)
    finally:
        hook.remove()
    assert tokens == [[[2, 7, 8, 5, 3]] * 3]  # [CLS] spotted dog . [SEP], for each key frame


def test_without_words_or_place_there_is_nothing_to_look_for(segmenter: GroundedSegmenter) -> None:
    def never() -> Video | None:
        raise AssertionError("the video was fetched")

    asked = Source(PROMPT, None, never)
    assert segmenter.region(asked, replace(DIFFERENCE, source_spans=())) is None
    assert segmenter.region(asked, replace(DIFFERENCE, scope=Scope.everything)) is None


def test_a_lost_video_leaves_the_evidence(segmenter: GroundedSegmenter) -> None:
    maps = torch.zeros(1, *GRID, dtype=torch.uint8)
    maps[0, :, 1, 2] = 255
    evidence = Evidence(((2, 14),), maps)
    expected = EvidenceSegmenter().region(Source(PROMPT, evidence), DIFFERENCE)
    assert expected is not None
    for without in (Source(PROMPT, evidence), Source(PROMPT, evidence, lambda: None)):
        region = segmenter.region(without, DIFFERENCE)
        assert region is not None and torch.equal(region, expected)
    assert segmenter.region(source(None), DIFFERENCE) is None


@given(st.integers(0, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_a_pooled_mask_covers_every_pixel(groups: int, rows: int, columns: int, token: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(1 + 4 * groups, rows * token, columns * token, generator=generator) < 0.1
    pooled = pool(pixels, (token, token))
    wide = pooled.repeat_interleave(token, 1).repeat_interleave(token, 2)
    spread = torch.cat([wide[:1], wide[1:].repeat_interleave(4, 0)])
    assert spread.shape == pixels.shape and not bool((pixels & ~spread).any())


# --- Folders ---------------------------------------------------------------------------------------------------------


def test_a_missing_folder_is_named_before_anything_is_loaded(grounded_folders: Folders, tmp_path: Path) -> None:
    dino, sam2 = grounded_folders
    gone = tmp_path / "gone"
    for folders in ((gone, sam2), (dino, gone)):
        with pytest.raises(WeightsError, match="gone holds no model of the type") as caught:
            GroundedSegmenter(*folders)
        assert "CHORUS_SEGMENTER=grounded:" in caught.value.hint


def test_folders_in_the_wrong_order(grounded_folders: Folders) -> None:
    dino, sam2 = grounded_folders
    with pytest.raises(WeightsError, match="holds a model of the type sam2_video, not grounding-dino"):
        GroundedSegmenter(sam2, dino)


@pytest.mark.parametrize(("which", "name"), [(0, "tokenizer.json"), (0, "model.safetensors"), (1, "model.safetensors")])
def test_a_damaged_folder_is_named(grounded_folders: Folders, tmp_path: Path, which: int, name: str) -> None:
    folders = [Path(shutil.copytree(each, tmp_path / each.name)) for each in grounded_folders]
    (folders[which] / name).write_bytes(b"\0" * 64)
    with pytest.raises(WeightsError, match=f"in .*{folders[which].name} can't be loaded"):
        GroundedSegmenter(folders[0], folders[1]).region(source(video()), DIFFERENCE)


def test_weights_that_a_file_lacks_are_not_made_up(grounded_folders: Folders, tmp_path: Path) -> None:
    dino, sam2 = grounded_folders
    copy = Path(shutil.copytree(sam2, tmp_path / "deeper"))
    config = json.loads((copy / "config.json").read_text())
    config["memory_attention_num_layers"] += 1
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"lacks \d+ weights"):
        GroundedSegmenter(dino, copy).region(source(video()), DIFFERENCE)
