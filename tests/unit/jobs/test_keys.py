"""Object keys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from chorus_batch.jobs import keys

DOMAIN = hashlib.sha256(b"domain").hexdigest()


def test_keys_name_the_attempt() -> None:
    assert keys.video_key(3, 14, 2) == "batches/3/jobs/14/attempts/2/video.mp4"
    assert keys.latents_key(3, 14, 2) == "batches/3/jobs/14/attempts/2/latents.safetensors"
    assert keys.checkpoint_key(3, 14, 2) == "batches/3/jobs/14/attempts/2/checkpoint.safetensors"
    assert keys.entry_key(DOMAIN, 14, 2) == f"cache/{DOMAIN[:2]}/{DOMAIN}/14-2.safetensors"
    assert keys.video_key(3, 14, 2).startswith(keys.batch_prefix(3))
    assert not keys.video_key(31, 4, 2).startswith(keys.batch_prefix(3))


def test_an_entrys_masks_lie_together() -> None:
    first, second = (keys.mask_key(DOMAIN, asked) for asked in ("dog", "cat"))
    assert first != second and first == keys.mask_key(DOMAIN, "dog")
    assert first.rpartition("/")[0] == second.rpartition("/")[0] == f"masks/{DOMAIN[:2]}/{DOMAIN}"


@pytest.mark.parametrize("part", ["", "..", "a/b", "a b", "\n", "1\n"])
def test_no_key_leaves_its_folder(part: str) -> None:
    calls: list[Callable[[], str]] = [
        lambda: keys.video_key(part, 1, 1),
        lambda: keys.latents_key(1, part, 1),
        lambda: keys.checkpoint_key(1, part, 1),
        lambda: keys.entry_key(part, 1, 1),
        lambda: keys.mask_key(part, "dog"),
        lambda: keys.entry_key(DOMAIN, part, 1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="not"):
            call()
