"""The engine's error tree: each error has a stable code and says what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint import Checkpoint


class EngineError(Exception):
    """Root of the tree.

    `code` is stable and machine-readable; `hint` says what to do next. This package knows nothing of the jobs' own
    errors: who joins the two translates.
    """

    code = "engine"

    def __init__(self, message: str, *, hint: str = "", code: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if code is not None:
            self.code = code


class WeightsError(EngineError):
    """A weight file is missing or isn't the one that was shipped."""

    code = "weights"


class OutOfMemory(EngineError):
    """The device has no room for the model; what was loaded of it is given back."""

    code = "out_of_memory"


class UnsupportedSettings(EngineError):
    """The model can't make a video of this size, length or schedule."""

    code = "unsupported_settings"


class BoundaryError(EngineError):
    """A boundary table isn't sorted, monotone and inside the steps, or a score isn't a number."""

    code = "boundaries"


class GainError(EngineError):
    """A gain isn't a finite number of at least 1, or its decay or step lies outside the steps."""

    code = "gain"


class RegionError(EngineError):
    """Masks or radii don't fit together, or a mask doesn't fit the token grid."""

    code = "region"


class DomainMismatch(EngineError):
    """The source was made by other weights or settings than the request asks for: reuse would be illegal."""

    code = "domain_mismatch"


class MissingStep(EngineError):
    """The cache entry doesn't hold the latents of a step that the boundaries read."""

    code = "missing_step"


class CorruptLatents(EngineError):
    """Stored latents are truncated, altered, of another shape or not finite."""

    code = "corrupt_latents"


class CorruptFeatures(EngineError):
    """Stored text features are truncated, altered, or of another shape."""

    code = "corrupt_features"


class CorruptMask(EngineError):
    """A stored mask is truncated, altered, or answers another question."""

    code = "corrupt_mask"


class NoOffsets(EngineError):
    """The tokenizer doesn't say which characters a token stands for, so no word can be found among the tokens."""

    code = "no_offsets"


class NotFinite(EngineError):
    """The generation holds NaN or infinity: it must never be stored as done."""

    code = "not_finite"


class ConstantOutput(EngineError):
    """The generation is one value everywhere: it must never be stored as done."""

    code = "constant_output"


class Stopped(EngineError):
    """The caller asked to stop; nothing of this generation may be published.

    `step` is the first step that wasn't computed, of `steps`; `checkpoint` is what a run needs to go on from there, or
    None where it has to begin again: a step cache's memory isn't kept.
    """

    code = "stopped"

    def __init__(self, step: int, steps: int, checkpoint: Checkpoint | None) -> None:
        super().__init__(f"stopped before step {step} of {steps}", hint="run the request again")
        self.step = step
        self.steps = steps
        self.checkpoint = checkpoint


class CheckpointMismatch(EngineError):
    """The checkpoint is another generation's, or the request's reuse has changed since."""

    code = "checkpoint_mismatch"
