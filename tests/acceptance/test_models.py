"""A Wan of one's own, as people use it: added, run with reuse by a worker process, verified."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chorus_batch.jobs.settings import load_settings
from chorus_batch.jobs.storage import ObjectStore

from .conftest import SCRIPT, Cli, run_script

PROMPTS = ("a red fox moves left over a gray background", "a red fox moves right over a gray background")
SIZE = ("--set", "width=48", "--set", "height=32", "--set", "frames=9")


@contextmanager
def worker() -> Iterator[None]:
    """A process of its own, with this one's settings."""
    process = subprocess.Popen([SCRIPT, "worker", "start"])
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_a_model_is_added_run_and_verified(
    wan_folder: Path, tmp_path: Path, production: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHORUS_MODEL", "tiny-wan")
    monkeypatch.setenv("CHORUS_DEVICE", "cpu")
    monkeypatch.setenv("CHORUS_S3_BUCKET", "only-a-wans")
    folder = shutil.copytree(wan_folder, tmp_path / "wan")
    path = tmp_path / "prompts.csv"
    path.write_text("prompt,seed\n" + "".join(f"{prompt},{seed}\n" for seed, prompt in enumerate(PROMPTS)))

    unknown = production("submit", path, *SIZE)
    assert unknown.code == 2
    assert "there is no model named 'tiny-wan'" in unknown.err and "chorus-batch model add" in unknown.err

    added = production("model", "add", "tiny-wan", folder, "--dtype", "fp32", "--distilled", "--json")
    assert added.code == 0, added.err
    assert (added.json["name"], added.json["weights"]["folder"]) == ("tiny-wan", str(folder))
    assert production("model", "list", "-q").lines == ["builtin", "builtin-4step", "tiny-wan"]
    assert str(folder) in production("model", "list").out
    assert production("model", "add", "tiny-wan", folder).code == 5

    told = production("submit", path, *SIZE, "--dry-run", "--device-memory", "24").out
    line = "tiny-wan, 48x32, 9 frames: needs about 1.0 GiB on the device (encoding); with tiling 1.0; with offload 1.0"
    assert f"memory: {line}: fits in 24.0 GiB\n" in told
    assert (
        f"memory: {line}: does not fit in 0.5 GiB\n"
        in production("estimate", path, *SIZE, "--device-memory", "0.5").out
    )
    assert f"memory: {line}\n" in production("estimate", path, *SIZE).out

    with worker():
        ended = production("submit", path, *SIZE, "--wait", "--json")
    assert ended.code == 0, ended.err
    assert (ended.json["done"], ended.json["hits"], ended.json["steps_total"]) == (2, 1, 8)
    assert ended.json["steps_skipped"] >= 1
    # Both texts were encoded once and are kept for every later batch; without guidance there is no negative one.
    assert len(list(ObjectStore.from_settings(load_settings()).list("texts/"))) == 2

    assert production("model", "verify", "tiny-wan", "-q").out == "tiny-wan\n"
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    wrong = production("model", "verify", "tiny-wan")
    assert wrong.code == 3
    assert "transformer/diffusion_pytorch_model.safetensors" in wrong.err and "fetch them again" in wrong.err


def test_the_four_step_model_is_there_too(production: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHORUS_MODEL", "builtin-4step")
    monkeypatch.setenv("CHORUS_S3_BUCKET", "only-four-steps")
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"a {colour} circle moves left over a white background\n" for colour in ("red", "blue")))
    refused = production("submit", path, "--set", "step_cache=teacache")
    assert refused.code == 3 and "give 10 steps or more" in refused.err
    with worker():
        ended = production("submit", path, "--wait", "--json")
    assert ended.code == 0, ended.err
    assert (ended.json["done"], ended.json["steps_total"]) == (2, 8)
    for job in production("jobs", str(ended.json["batch_id"]), "-q").lines:
        shown = production("show", job).out
        assert "background right" in shown and "colour right" in shown


def test_a_worker_that_could_only_fail_jobs_doesnt_start(wan_folder: Path, tmp_path: Path, production: Cli) -> None:
    folder = shutil.copytree(wan_folder, tmp_path / "wan")
    assert production("model", "add", "tiny-wan", folder, "--dtype", "fp32").code == 0
    (folder / "vae" / "config.json").unlink()
    for code, told, settings in (
        (3, "vae/config.json is missing", {"model": "tiny-wan"}),
        (2, "there is no model named 'tiny-van'", {"model": "tiny-van"}),
        (2, "gone holds no language model", {"differ": f"llm:{tmp_path}/gone"}),
        (2, "attention backend '_flash_3' can't run here", {"attention_backend": "_flash_3", "device": "cpu"}),
    ):
        refused = run_script("worker", "start", **settings)
        assert (refused.code, told in refused.err) == (code, True), refused.err
        # The next step stands below.
        assert len(refused.err.splitlines()) >= 2
    assert production("worker", "list", "-q").out == ""
