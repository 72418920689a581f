"""The room of the models beside the video model: read from their folders, told before the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from chorus_batch.jobs import auxiliary, doctor, memory, registry
from chorus_batch.jobs.auxiliary import auxiliaries, finding
from chorus_batch.jobs.memory import ALONE, GIB, Auxiliaries, Verdict, arrangements, choose, describe, needs_tiling
from chorus_batch.jobs.parameters import Parameters
from chorus_batch.jobs.registry import Asked
from chorus_batch.jobs.settings import Settings
from tests.language_model import save_model
from tests.unit.jobs.test_memory import AT_480P, SMALL, live_bytes

Folders = tuple[Path, Path]

ASKED = Parameters("small", 832, 480, 81, 16, 50, 5.0, 5.0, "unipc", "")


def grounded(folders: Folders) -> Settings:
    return Settings(segmenter="grounded:{},{}".format(*folders))


def bytes_of(*folders: Path) -> int:
    import torch
    from safetensors.torch import load_file

    tensors: list[torch.Tensor] = []
    for folder in folders:
        tensors += load_file(folder / "model.safetensors").values()
    return sum(each.numel() * each.element_size() for each in tensors)


def test_what_needs_no_model_needs_no_room() -> None:
    assert auxiliaries(Settings()) == ALONE


def test_a_segmenters_room_follows_from_its_files(grounded_folders: Folders) -> None:
    found = auxiliaries(grounded(grounded_folders))
    assert (found.weights, found.unknown) == ({"segmenter": bytes_of(*grounded_folders)}, ())
    # Its processor makes pictures of up to 48x96; SAM 2's first stage is 8 wide.
    config = json.loads((grounded_folders[0] / "config.json").read_text())
    assert found.work == max(4 * finding(config, 48, 96), 64 * 64 * (5 * 8 + 25 * 8))
    assert finding(config, 48, 96) < finding(config, 96, 96) < finding({**config, "d_model": 64}, 96, 96)


def test_a_language_models_room_follows_from_its_files(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "llm")
    found = auxiliaries(Settings(differ=f"llm:{folder}"))
    assert (found.weights, found.unknown) == ({"differ": (folder / "model.safetensors").stat().st_size}, ())
    assert found.work >= 16 * 1024 * 4 * (2 * 16 + 3 * 16)


def test_the_engines_own_numbers() -> None:
    from chorus_batch.chorus import grounded, llm_differ

    assert (auxiliary.PICTURES, auxiliary.OBJECTS) == (grounded.AT_ONCE, grounded.MOST)
    assert auxiliary.QUESTIONS == llm_differ.AT_ONCE and auxiliary.TOKENS > llm_differ.MAX_NEW_TOKENS


def test_what_isnt_on_this_host_is_said(grounded_folders: Folders, tmp_path: Path) -> None:
    gone = Settings(segmenter=f"grounded:{grounded_folders[0]},{tmp_path}", differ=f"llm:{tmp_path / 'gone'}")
    found = auxiliaries(gone)
    assert found == Auxiliaries({}, found.work, ("segmenter", "differ"))
    line = describe(SMALL, ASKED, 512, "bfloat16", None, found)
    assert line.endswith(
        "; without the segmenter, which isn't on this host; without the differ, which isn't on this host"
    )


def test_they_stay_in_every_phase_and_work_between_two_jobs() -> None:
    others = Auxiliaries({"segmenter": GIB, "differ": 3 * GIB}, 2 * GIB)
    for before, after in zip(
        arrangements(SMALL, AT_480P, "bfloat16"), arrangements(SMALL, AT_480P, "bfloat16", others), strict=True
    ):
        for less, more in zip(before.peaks, after.peaks, strict=True):
            assert more.total - less.total == 4 * GIB + (int(2.2 * GIB) if more.phase == "deciding" else 0)
    assert choose(arrangements(SMALL, AT_480P, "bfloat16"), 26 * GIB) is Verdict.fits
    assert choose(arrangements(SMALL, AT_480P, "bfloat16", others), 26 * GIB) is Verdict.tiling
    assert needs_tiling(SMALL, AT_480P, "bfloat16", 26 * GIB, 26 * GIB, others)
    line = describe(SMALL, ASKED, 512, "bfloat16", 26 * GIB, others)
    assert line == (
        "small, 832x480, 81 frames: needs about 29.3 GiB on the device (finding what differs beside decoding);"
        " with tiling 23.0; with offload 18.4: needs tiling in 26.0 GiB;"
        " of it the segmenter 1.0 and the differ 3.0 GiB, and 2.0 while they work"
    )
    idle = replace(others, work=0)
    assert "29.0 GiB on the device (decoding beside denoising)" in memory.tell(
        arrangements(SMALL, AT_480P, "bfloat16", idle)
    )


def test_the_doctor_tells(wan_folder: Path, grounded_folders: Folders, tmp_path: Path) -> None:
    settings = replace(grounded(grounded_folders), data_dir=tmp_path, model="tiny")
    registry.add(settings, Asked("tiny", str(wan_folder), dtype="float32", distilled=True))
    for asked, told in ((settings, True), (replace(settings, segmenter="evidence"), False)):
        assert ("; of it the segmenter 0.0 GiB, and 0.0 while they work" in doctor._memory(asked).detail) is told


def test_finding_holds_what_is_said() -> None:
    """GroundingDINO at its released widths, with fewer layers, for a picture of 256x320."""
    import torch
    from transformers import GroundingDinoConfig, GroundingDinoForObjectDetection

    swin = {"model_type": "swin", "out_indices": [2, 3, 4], "embed_dim": 96, "depths": [1] * 4, "image_size": 224}
    config = GroundingDinoConfig(
        backbone_config={**swin, "num_heads": [3, 6, 12, 24], "window_size": 7},
        text_config={"model_type": "bert", "num_hidden_layers": 1, "vocab_size": 32},
        encoder_layers=1,
        decoder_layers=2,
    )
    model = GroundingDinoForObjectDetection(config).eval()
    words = torch.ones(1, 16, dtype=torch.long)
    asked = {"input_ids": words, "attention_mask": words, "token_type_ids": torch.zeros_like(words)}
    found = live_bytes(lambda: model(pixel_values=torch.zeros(1, 3, 256, 320), **asked))
    said = finding(config.to_dict(), 256, 320)
    assert found <= said <= 1.25 * found


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors"])
def test_a_damaged_folder_is_unknown(damage: str, grounded_folders: Folders, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(grounded_folders[1], tmp_path / "sam2"))
    (copy / damage).write_text("{")
    found = auxiliaries(grounded((grounded_folders[0], copy)))
    assert (found.weights, found.unknown) == ({}, ("segmenter",))
