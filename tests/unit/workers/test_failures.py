"""What an exception means for the job that it ended."""

from __future__ import annotations

import pytest
import torch

from chorus_batch.chorus.errors import NotFinite, OutOfMemory
from chorus_batch.jobs.errors import ObjectMissing
from chorus_batch.workers.failures import Failure


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (NotFinite("NaN", hint="check"), Failure("not_finite", "NaN. check", retry=False)),
        (ObjectMissing("gone"), Failure("object_missing", "gone", retry=False)),
        (OutOfMemory("no room", hint="free it"), Failure("out_of_memory", "no room. free it", retry=True)),
        (MemoryError(), Failure("out_of_memory", "out of memory", retry=True)),
        (torch.OutOfMemoryError("CUDA out of memory"), Failure("out_of_memory", "CUDA out of memory", retry=True)),
        (torch.AcceleratorError("an assert"), Failure("device_lost", "an assert", retry=True, lost=True)),
        (ZeroDivisionError("by 0"), Failure("internal", "ZeroDivisionError: by 0", retry=True)),
    ],
)
def test_each_error_has_its_meaning(error: Exception, failure: Failure) -> None:
    assert Failure.of(error) == failure
