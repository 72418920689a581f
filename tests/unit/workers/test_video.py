import io
import os
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import pytest

from chorus_batch.jobs.errors import ChorusBatchError
from chorus_batch.workers.video import VideoError, VideoInfo, probe, read_mp4, write_mp4

Frames = npt.NDArray[np.uint8]


def moving_square(frames: int = 9, height: int = 64, width: int = 64) -> Frames:
    video = np.full((frames, height, width, 3), (128, 40, 200), np.uint8)
    for t in range(frames):
        video[t, 16:32, 4 * t : 4 * t + 16] = (250, 30, 20)
    return video


def test_what_is_written_is_what_was_asked_for(tmp_path: Path) -> None:
    info = write_mp4(moving_square(), 8, tmp_path / "a.mp4")
    assert info == VideoInfo(64, 64, 9, 8.0, "h264", "yuv420p")
    assert probe(tmp_path / "a.mp4") == probe((tmp_path / "a.mp4").read_bytes()) == info
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]


def test_colors_and_motion_survive(tmp_path: Path) -> None:
    video = moving_square()
    write_mp4(video, 8, tmp_path / "a.mp4")
    error = np.abs(read_mp4((tmp_path / "a.mp4").read_bytes()).astype(int) - video)
    # Chroma is at half the size, so edges smear; areas don't.
    assert np.median(error) <= 3
    assert error.mean() < 4


@pytest.mark.parametrize("length", [0, 100, 1500])
def test_what_is_no_video_is_not_read(tmp_path: Path, length: int) -> None:
    write_mp4(moving_square(), 8, tmp_path / "a.mp4")
    with pytest.raises(VideoError):
        read_mp4((tmp_path / "a.mp4").read_bytes()[:length])


def test_the_index_comes_first(tmp_path: Path) -> None:
    write_mp4(moving_square(), 8, tmp_path / "a.mp4")
    data = (tmp_path / "a.mp4").read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat")


@pytest.mark.parametrize("comment", ["", "job 7, seed 3"])
def test_the_same_frames_give_the_same_bytes(tmp_path: Path, comment: str) -> None:
    write_mp4(moving_square(), 8, tmp_path / "a.mp4", comment=comment)
    write_mp4(moving_square(), 8, tmp_path / "b.mp4", comment=comment)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert container.metadata.get("comment", "") == comment


@pytest.mark.parametrize(("height", "width"), [(63, 64), (64, 63), (33, 35), (2, 2), (1, 1)])
def test_odd_sizes_become_even(tmp_path: Path, height: int, width: int) -> None:
    video = moving_square(height=64, width=64)[:, :height, :width]
    info = write_mp4(video, 8, tmp_path / "a.mp4")
    assert (info.width, info.height) == (width + width % 2, height + height % 2)
    assert np.abs(read_mp4((tmp_path / "a.mp4").read_bytes())[0, 0, 0].astype(int) - video[0, 0, 0]).max() < 12


@pytest.mark.parametrize(("frames", "fps"), [(1, 1), (2, 24), (81, 16)])
def test_lengths_and_rates(tmp_path: Path, frames: int, fps: int) -> None:
    info = write_mp4(moving_square(frames, 32, 48), fps, tmp_path / "a.mp4")
    assert (info.frames, info.fps) == (frames, fps)


def test_it_replaces_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"an earlier attempt")
    write_mp4(moving_square(), 8, tmp_path / "a.mp4")
    assert probe(tmp_path / "a.mp4").frames == 9


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros((9, 64, 64), np.uint8),
        np.zeros((9, 64, 64, 4), np.uint8),
        np.zeros((9, 64, 64, 3), np.float32),
        np.zeros((0, 64, 64, 3), np.uint8),
        np.zeros((9, 0, 64, 3), np.uint8),
    ],
)
def test_what_are_no_frames_is_refused(tmp_path: Path, bad: Frames) -> None:
    with pytest.raises(VideoError, match="frames"):
        write_mp4(bad, 8, tmp_path / "a.mp4")
    with pytest.raises(VideoError, match="fps"):
        write_mp4(moving_square(), 0, tmp_path / "a.mp4")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match="can't write") as refused:
        write_mp4(moving_square(), 8, tmp_path / "no" / "a.mp4")
    assert isinstance(refused.value, ChorusBatchError)
    assert refused.value.code == "video"


def test_what_does_not_play_is_refused(tmp_path: Path) -> None:
    write_mp4(moving_square(), 8, tmp_path / "a.mp4")
    data = (tmp_path / "a.mp4").read_bytes()
    for broken in (b"", b"no video at all", os.urandom(500), data[: len(data) // 4]):
        with pytest.raises(VideoError):
            probe(broken)
    with pytest.raises(VideoError):
        probe(tmp_path / "b.mp4")


def test_a_file_without_pictures_is_refused() -> None:
    sound = io.BytesIO()
    with av.open(sound, "w", format="wav") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(VideoError, match="no video stream"):
        probe(sound.getvalue())
