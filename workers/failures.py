"""What an exception means for the job that it ended."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chorus_batch.chorus.errors import EngineError, OutOfMemory
from chorus_batch.jobs.errors import ChorusBatchError

OUT_OF_MEMORY = OutOfMemory.code
DEVICE_LOST = "device_lost"
INTERNAL = "internal"


@dataclass(frozen=True)
class Failure:
    """`retry`: another try may help. `lost`: the device's context is poisoned, whatever came next would be garbage."""

    code: str
    message: str
    retry: bool
    lost: bool = False

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Named errors come again with the same input; a full memory or a lost device may not."""
        if isinstance(error, (EngineError, ChorusBatchError)):
            message = f"{error}. {error.hint}" if error.hint else str(error)
            return cls(error.code, message, retry=isinstance(error, OutOfMemory))  # another device may have room
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return cls(OUT_OF_MEMORY, str(error) or "out of memory", retry=True)
        if isinstance(error, torch.AcceleratorError):
            return cls(DEVICE_LOST, str(error), retry=True, lost=True)
        return cls(INTERNAL, f"{type(error).__name__}: {error}", retry=True)
