"""How much memory a model needs on its device, and how it must be arranged there. Pure arithmetic.

What a phase holds beside the weights, in bytes, with b the bytes of the dtype:

- *encoding*: UMT5 builds its attention scores, so 4 float32 matrices of heads x slots x slots.
- *denoising*: a block's peak lies in its feed-forward layer, or in its norms (float32 copies) and attention: for each
  token max(2 ffn b + 4.5 width b, width (10.5 + 6.5 b)). Scores aren't built: flash and memory-efficient attention
  need none (Dao et al., arXiv 2205.14135). Beside it the text's keys and values in all layers, of two branches.
- *decoding*: the codec works frame by frame in float32, and keeps two frames before each convolution: 51 images of the
  size and width of its last layers, and the video. In tiles of 256 pixels, 192 apart, the same for a tile, while
  tiles and video are kept: at most twice the video, and five times when it is put together.

The factors are those of the live tensors of the real classes at Wan2.1's sizes (a test counts them), rounded up. The
result of one job is decoded beside the denoising of the next, so the two add up. MARGIN is for what isn't tensors: the
device's context, the libraries' work space, and what the allocator can't use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from chorus_batch.jobs.anatomy import Anatomy
from chorus_batch.jobs.parameters import Parameters

BYTES: Mapping[str, int] = {"bfloat16": 2, "float32": 4}
GIB = 1 << 30
MARGIN = GIB  # and as much again as SLACK of what the phases hold beside the weights
SLACK = 0.1
SPATIAL, TEMPORAL = 8, 4  # pixels and frames for each latent
TILE = 256  # pixels: diffusers' own
CODEC_IMAGES = 51
VIDEO_VALUE = 12  # bytes of a pixel: three float32


class Verdict(StrEnum):
    """From the best to the worst."""

    fits = "fits"
    tiling = "needs tiling"
    offload = "needs offload"
    too_large = "does not fit"


@dataclass(frozen=True)
class Peak:
    """The most that a phase holds, in bytes by what it is."""

    phase: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Arrangement:
    """One way to lay a model out, and the peaks of its phases."""

    verdict: Verdict
    peaks: tuple[Peak, ...]

    @property
    def highest(self) -> Peak:
        """The phase that decides."""
        return max(self.peaks, key=lambda peak: peak.total)


@dataclass(frozen=True)
class Task:
    """What is to be made: pixels, frames, and the text slots that the model reads."""

    width: int
    height: int
    frames: int
    slots: int
    step_cache: bool = False

    @classmethod
    def of(cls, parameters: Parameters, slots: int) -> Task:
        """The task of a domain."""
        cached = parameters.step_cache != "none"
        return cls(parameters.width, parameters.height, parameters.frames, slots, cached)


@dataclass(frozen=True)
class Auxiliaries:
    """The models beside the video model: bytes of their weights by what they do, the most that one of them holds at
    work beside these, and those whose files aren't on this host.
    """

    weights: Mapping[str, int]
    work: int = 0
    unknown: tuple[str, ...] = ()


ALONE = Auxiliaries({})


def arrangements(anatomy: Anatomy, task: Task, dtype: str, others: Auxiliaries = ALONE) -> tuple[Arrangement, ...]:
    """From the fastest to the smallest: all on the device; decoded in tiles too; the text encoder off it too.

    With offload the text encoder and the transformer take turns. The codec stays: it is needed beside the transformer.
    What is loaded beside them, `others`, stays too, and works between two jobs, while the first is decoded.
    """
    size = BYTES[dtype]
    transformer = {"transformer": anatomy.transformer * size}
    text = {"text encoder": anatomy.text_encoder * size}
    codec = {"codec": anatomy.codec * 4}
    encoding = {"encoding": _slack(anatomy.text_heads * task.slots**2 * 16)}
    denoising = {"denoising": _slack(_denoising(anatomy, task, size))}
    whole = {"decoding": _slack(_whole(anatomy, task.width, task.height, task.frames))}
    tiles = {"decoding in tiles": _slack(_tiled(anatomy, task))}
    margin = {**others.weights, "margin": MARGIN}
    deciding = {"deciding": _slack(others.work)}
    found = []
    for verdict, decoding, encoder in (
        (Verdict.fits, whole, text),
        (Verdict.tiling, tiles, text),
        (Verdict.offload, tiles, {}),
    ):
        # Taking turns: no transformer while the encoder is there.
        beside = transformer if encoder else {}
        peaks = (
            Peak("encoding", {**beside, **text, **codec, **encoding, **decoding, **margin}),
            Peak("denoising", {**transformer, **encoder, **codec, **denoising, **margin}),
            Peak("decoding", {**transformer, **encoder, **codec, **denoising, **decoding, **margin}),
            Peak("deciding", {**transformer, **encoder, **codec, **deciding, **decoding, **margin}),
        )
        found.append(Arrangement(verdict, peaks))
    return tuple(found)


def choose(found: tuple[Arrangement, ...], memory: int) -> Verdict:
    """The first arrangement whose highest peak is within `memory` bytes."""
    return next((each.verdict for each in found if each.highest.total <= memory), Verdict.too_large)


def tell(found: tuple[Arrangement, ...], memory: int | None = None) -> str:
    """One line for a person; with the device's `memory` in bytes, what it means there."""
    first, *others = found
    phase = first.highest.phase
    names = {"decoding": "decoding beside denoising", "deciding": "finding what differs beside decoding"}
    phase = names.get(phase, phase)
    text = f"needs about {_gib(first.highest.total)} GiB on the device ({phase})"
    hows = {Verdict.tiling: "tiling", Verdict.offload: "offload"}
    text += "".join(f"; with {hows[each.verdict]} {_gib(each.highest.total)}" for each in others)
    return text if memory is None else f"{text}: {choose(found, memory)} in {_gib(memory)} GiB"


def tell_others(others: Auxiliaries) -> str:
    """What of it the models beside the video model take, to be put behind such a line; nothing where there are none."""
    parts = [f"the {name} {_gib(size)}" for name, size in others.weights.items()]
    text = f"; of it {' and '.join(parts)} GiB, and {_gib(others.work)} while they work" if parts else ""
    return text + "".join(f"; without the {name}, which isn't on this host" for name in others.unknown)


def describe(
    anatomy: Anatomy,
    parameters: Parameters,
    slots: int,
    dtype: str,
    memory: int | None = None,
    others: Auxiliaries = ALONE,
) -> str:
    """What videos of such parameters need, in one line."""
    line = tell(arrangements(anatomy, Task.of(parameters, slots), dtype, others), memory) + tell_others(others)
    return f"{parameters.model}, {parameters.width}x{parameters.height}, {parameters.frames} frames: {line}"


def needs_tiling(anatomy: Anatomy, task: Task, dtype: str, memory: int, free: int, others: Auxiliaries = ALONE) -> bool:
    """Whether a worker decodes in tiles: all at once doesn't fit the device's `memory`, or what is `free` now (bytes).

    What is free now isn't enough to know: the next job's denoising may be between two peaks.
    """
    whole = _slack(_whole(anatomy, task.width, task.height, task.frames))
    return whole > free or choose(arrangements(anatomy, task, dtype, others), memory) is not Verdict.fits


def _denoising(anatomy: Anatomy, task: Task, size: int) -> int:
    time, height, width = anatomy.patch
    latents = (task.frames - 1) // TEMPORAL + 1
    tokens = -(-latents // time) * -(-task.height // (SPATIAL * height)) * -(-task.width // (SPATIAL * width))
    fed = (2 * anatomy.ffn_width + 4.5 * anatomy.width) * size
    attended = anatomy.width * (10.5 + 6.5 * size)
    # A step cache keeps what the blocks added, in two branches, and what it began from.
    kept = 4 * anatomy.width * size if task.step_cache else 0
    text = 2 * anatomy.layers * 2 * task.slots * anatomy.width * size
    return int(tokens * (max(fed, attended) + kept)) + text


def _whole(anatomy: Anatomy, width: int, height: int, frames: int) -> int:
    video = width * height * frames * VIDEO_VALUE
    # A single frame has no time to convolve over.
    return max(CODEC_IMAGES * anatomy.codec_width * 4 * width * height + video, 5 * video)


def _tiled(anatomy: Anatomy, task: Task) -> int:
    video = task.width * task.height * task.frames * VIDEO_VALUE
    tile = CODEC_IMAGES * anatomy.codec_width * 4 * min(task.width, TILE) * min(task.height, TILE)
    # A small video is one tile.
    return min(max(tile + 2 * video, 5 * video), _whole(anatomy, task.width, task.height, task.frames))


def _slack(size: int) -> int:
    return int(size * (1 + SLACK))


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
