"""Frames to MP4 and back to facts: H.264, yuv420p, index first, looked at again after writing."""

from __future__ import annotations

import io
import os
import tempfile
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import av.error
import numpy as np
import numpy.typing as npt
from av.video.reformatter import ColorRange, Colorspace

from chorus_batch.jobs.errors import ChorusBatchError

# Visually lossless for the small videos of the built-in model, and still small for large ones.
QUALITY = "16"
# ITU-T H.273: BT.709 primaries, transfer and matrix, so that players needn't guess from the size.
BT709 = 1


class VideoError(ChorusBatchError):
    """A video couldn't be written, or what was written isn't what was asked for."""

    code = "video"


@dataclass(frozen=True)
class VideoInfo:
    """What a video file holds: size in pixels, frames counted by decoding them all, frames per second."""

    width: int
    height: int
    frames: int
    fps: float
    codec: str
    pix_fmt: str


def write_mp4(frames: npt.NDArray[np.uint8], fps: int, path: Path, *, comment: str = "") -> VideoInfo:
    """Write frames [T, H, W, 3] (RGB, uint8) as MP4 and return what a probe of the file found.

    H.264, yuv420p, the index before the data so that browsers start at once. Odd sizes are made even by repeating the
    last row or column. The same input gives the same bytes. The file appears whole or not at all. Raises VideoError.
    """
    if frames.ndim != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8 or 0 in frames.shape:
        raise VideoError(f"frames must be uint8 [T, H, W, 3], not {frames.dtype} {list(frames.shape)}")
    if fps < 1:
        raise VideoError(f"fps must be at least 1, not {fps}")
    even = np.pad(frames, ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)), mode="edge")
    wanted = VideoInfo(even.shape[2], even.shape[1], even.shape[0], float(fps), "h264", "yuv420p")
    # A file, for the index is moved to the front by opening the output again by its name.
    try:
        handle, name = tempfile.mkstemp(suffix=".mp4", prefix=f".{path.stem}-", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise VideoError(f"can't write {path}: {error}", hint="is the folder there and writable?") from error
    part = Path(name)
    try:
        _encode(even, fps, part, comment)
        found = probe(part)
        if found != wanted:
            raise VideoError(f"{path}: written as {wanted}, but it holds {found}")
        part.chmod(0o644)
        part.replace(path)
    except (av.error.FFmpegError, OSError) as error:
        raise VideoError(f"can't write {path}: {error}", hint="is the disk full?") from error
    finally:
        part.unlink(missing_ok=True)
    return found


def probe(source: Path | bytes) -> VideoInfo:
    """Decode a whole video, a file or its bytes, and say what it holds. Raises VideoError if it can't be played."""
    try:
        with av.open(io.BytesIO(source) if isinstance(source, bytes) else str(source), "r") as container:
            if not container.streams.video:
                raise VideoError("the file holds no video stream")
            stream = container.streams.video[0]
            frames = sum(1 for _ in container.decode(stream))
            context = stream.codec_context
            return VideoInfo(
                context.width,
                context.height,
                frames,
                float(stream.average_rate or 0),
                context.name,
                context.pix_fmt or "",
            )
    except (av.error.FFmpegError, OSError) as error:
        raise VideoError(f"the video can't be played: {error}") from error


def read_mp4(data: bytes) -> npt.NDArray[np.uint8]:
    """All frames of a video that `write_mp4` wrote, [T, H, W, 3] (RGB). Raises VideoError."""
    try:
        with av.open(io.BytesIO(data), "r") as container:
            frames = [
                frame.to_ndarray(format="rgb24", src_colorspace=Colorspace.ITU709, src_color_range=ColorRange.MPEG)
                for frame in container.decode(video=0)
            ]
    except (av.error.FFmpegError, OSError, IndexError) as error:
        raise VideoError(f"the video can't be played: {error}") from error
    if not frames:
        raise VideoError("the video holds no frame")
    return np.stack(frames)


def _encode(frames: npt.NDArray[np.uint8], fps: int, path: Path, comment: str) -> None:
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        if comment:
            container.metadata["comment"] = comment
        # One thread: with several the bytes differ from machine to machine.
        stream = container.add_stream(
            "libx264", rate=Fraction(fps), options={"crf": QUALITY, "x264-params": "threads=1"}
        )
        stream.thread_count = 1
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        context = stream.codec_context
        context.color_primaries = context.color_trc = context.colorspace = BT709
        context.color_range = ColorRange.MPEG
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24").reformat(
                format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
            )
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
