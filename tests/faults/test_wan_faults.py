"""A Wan's own faults and savings in a worker: no room to decode, texts that are encoded ahead, and lost ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chorus_batch.chorus.wan_codec import WanCodec
from chorus_batch.chorus.wan_text import WanText
from chorus_batch.jobs import registry
from chorus_batch.jobs.models import CacheMode
from chorus_batch.jobs.registry import Asked
from chorus_batch.workers.decoder import TILED
from tests.faults.bench import Bench, Worker

Hire = Callable[..., Worker]

SIZE = {"width": "48", "height": "32", "frames": "9"}
PROMPTS = ("a red fox moves left", "the circle moves over a gray background", "a fox")


@pytest.fixture
def wan(bench: Bench, wan_folder: Path, tmp_path: Path) -> Bench:
    """The bench with a Wan's model."""
    bench.settings = replace(bench.settings, model="tiny", models_dir=str(tmp_path / "models"))
    registry.add(bench.settings, Asked("tiny", str(wan_folder), dtype="float32", distilled=True))
    return bench


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that any worker's encoder is given."""
    real, texts = WanText.encode, []

    def encode(self: WanText, text: str) -> torch.Tensor:
        texts.append(text)
        return real(self, text)

    monkeypatch.setattr(WanText, "encode", encode)
    return texts


def test_a_device_too_full_to_decode_costs_no_try(wan: Bench, hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    real, tried = WanCodec.decode, []

    def decode(self: WanCodec, latents: torch.Tensor) -> torch.Tensor:
        tried.append(self.tiling)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return real(self, latents)

    monkeypatch.setattr(WanCodec, "decode", decode)
    batch = wan.submit(PROMPTS[:2], cache=CacheMode.exact, parameters=SIZE)
    hire(model=wan.settings.model, models_dir=wan.settings.models_dir).work()
    wan.check_done(batch)
    assert tried == [False, True, False]
    first, second = wan.jobs(batch)
    assert (wan.attempts(first.id), TILED in first.notes, TILED in second.notes) == (["done"], True, False)


def test_a_batchs_texts_are_encoded_together_and_once(wan: Bench, hire: Hire, encoded: list[str]) -> None:
    asked = {**SIZE, "guidance_scale": "2", "negative_prompt": "gray"}
    batch = wan.submit([*PROMPTS, PROMPTS[0]], cache=CacheMode.off, parameters=asked)
    worker = hire(model=wan.settings.model, models_dir=wan.settings.models_dir)
    worker.work()
    wan.check_done(batch)
    assert sorted(encoded) == sorted([*PROMPTS, "gray"])
    took = wan.sql("SELECT (seconds->>'texts')::float8 AS s FROM generations ORDER BY job_id")
    assert all(row.s is not None for row in took)
    # Another worker, and another batch: nothing is encoded, and the videos are the same.
    encoded.clear()
    again = wan.submit([*PROMPTS, PROMPTS[0]], cache=CacheMode.off, parameters=asked)
    hire(model=wan.settings.model, models_dir=wan.settings.models_dir).work()
    assert (encoded, wan.latents(again)) == ([], wan.latents(batch))
    # A text that the store has lost is encoded again, and nothing else.
    lost = sorted(wan.keys("texts/"))[0]
    wan.store.remove([lost])
    third = wan.submit([*PROMPTS, PROMPTS[0]], cache=CacheMode.off, parameters=asked)
    hire(model=wan.settings.model, models_dir=wan.settings.models_dir).work()
    assert (len(encoded), wan.latents(third)) == (1, wan.latents(batch))
    assert lost in wan.keys("texts/")


def test_jobs_of_a_model_that_isnt_here_are_left_alone(
    wan: Bench, hire: Hire, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    card = wan.settings.models_folder / "tiny.json"
    theirs = wan.submit(parameters=SIZE)
    table = json.loads(card.read_text())
    folder, table["weights"]["folder"] = table["weights"]["folder"], str(tmp_path / "gone")
    card.write_text(json.dumps(table))
    wan.settings = replace(wan.settings, model="builtin")
    mine = wan.submit()
    worker = hire(models_dir=wan.settings.models_dir)
    worker.work()
    wan.check_done(mine)
    assert {job.state for job in wan.jobs(theirs)} == {"ready", "waiting"}
    assert [wan.attempts(job.id) for job in wan.jobs(theirs)] == [[]] * 4
    told = [each for each in caplog.messages if "aren't claimed" in each]
    assert told == [f"jobs of the model tiny aren't claimed: there is no folder {tmp_path / 'gone'}"]
    # Where it is, they are done.
    table["weights"]["folder"] = folder
    card.write_text(json.dumps(table))
    hire(models_dir=wan.settings.models_dir).work()
    wan.check_done(theirs)
