"""The check of a GPU: here that it runs to its end, on a GPU what it must show."""

from __future__ import annotations

import pytest

from tests.gpu import production


def test_it_walks_to_its_end_without_a_gpu() -> None:
    found = production.main(["--smoke"])
    assert set(production.SECTIONS) < set(found)
    assert found["determinism"]["equal"] and found["resume"]["equal"]
    assert found["resume"]["stopped_before_step"] == 1
    assert 0 < found["shares"]["0.5"]["ideal"] < 0.6
    assert found["decoding"]["rms_off"] < 1.0 and found["backends"]["native"]["rms_off"] == 0.0


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_a_gpu_keeps_the_promises() -> None:
    found = production.main([])
    assert found["determinism"]["equal"] and found["resume"]["equal"]
    assert found["shares"]["0.5"]["faster"] > production.PAPER
