"""What runs the blocks is tried out on the device, in the model's dtype, by a program of its own."""

from __future__ import annotations

import json

import pytest

from chorus_batch.chorus import network
from chorus_batch.chorus.block import CompiledBlock
from chorus_batch.chorus.errors import UnsupportedSettings
from chorus_batch.jobs import fitness as asked
from chorus_batch.jobs.settings import Settings
from chorus_batch.workers import fitness


@pytest.mark.parametrize("backend", ["_flash_3", "xyz"])
def test_an_attention_backend_that_cant_run_is_named(backend: str) -> None:
    with pytest.raises(UnsupportedSettings, match=f"attention backend '{backend}' can't run here: ") as refused:
        fitness.try_out(Settings(device="cpu", attention_backend=backend))
    assert "CHORUS_ATTENTION_BACKEND" in refused.value.hint
    fitness.try_out(Settings(device="cpu", attention_backend="native"))


def test_what_it_says_is_what_a_starting_worker_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHORUS_DEVICE", "cpu")
    monkeypatch.setenv("CHORUS_ATTENTION_BACKEND", "xyz")
    with pytest.raises(SystemExit) as ended:
        fitness.main()
    assert ended.value.code == asked.REFUSED
    assert json.loads(capsys.readouterr().out).keys() == {"message", "hint"}
    monkeypatch.setenv("CHORUS_ATTENTION_BACKEND", "native")
    fitness.main()
    assert capsys.readouterr().out == ""
    assert fitness.__name__ == asked.DEVICE_CHECK


def test_the_compiler_is_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a machine with a compiler; test_compile.py has one without.
    monkeypatch.setattr(network, "CompiledBlock", lambda backend: CompiledBlock(f"no {backend}"))
    with pytest.raises(UnsupportedSettings, match=r"torch\.compile can't run here: .*no inductor"):
        fitness.try_out(Settings(device="cpu", compile=True))
