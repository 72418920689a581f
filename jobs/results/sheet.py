"""A contact sheet: a few frames of every video of a batch on one picture, to be judged at a glance."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

FRAMES = 5  # of each video, evenly spread, the first and the last among them
TALL = 96  # pixels
CAPTION = 16  # pixels
COLUMNS = 2
GAP = 6


def contact_sheet(videos: Iterable[tuple[Path, str]], path: Path) -> int:
    """Write a PNG of (video, caption) pairs to `path`, two videos a row; return how many there are."""
    from PIL import Image

    strips = [_strip(video, caption) for video, caption in videos]
    if not strips:
        return 0
    wide = max(strip.width for strip in strips)
    rows = -(-len(strips) // COLUMNS)
    size = (COLUMNS * (wide + GAP) + GAP, rows * (TALL + CAPTION + GAP) + GAP)
    sheet = Image.new("RGB", size, "white")
    for n, strip in enumerate(strips):
        sheet.paste(strip, (GAP + n % COLUMNS * (wide + GAP), GAP + n // COLUMNS * (TALL + CAPTION + GAP)))
    sheet.save(path)
    return len(strips)


def _strip(video: Path, caption: str) -> Image.Image:
    import av
    from PIL import Image, ImageDraw

    with av.open(str(video)) as container:
        frames = [frame.to_image() for frame in container.decode(video=0)]
    picked = [frames[round(n * (len(frames) - 1) / (FRAMES - 1))] for n in range(FRAMES)]
    wide = round(frames[0].width * TALL / frames[0].height)
    strip = Image.new("RGB", (FRAMES * (wide + 2), TALL + CAPTION), "white")
    for n, frame in enumerate(picked):
        strip.paste(frame.resize((wide, TALL), Image.Resampling.BICUBIC), (n * (wide + 2), CAPTION))
    ImageDraw.Draw(strip).text((0, 2), caption, fill="black")
    return strip
