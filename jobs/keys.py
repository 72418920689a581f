"""Where each object lies in the store: the only place that spells object keys.

A key names the attempt that wrote it, so two attempts at one job never write the same object and a worker that lost its
claim can't overwrite what its successor made.
"""

from __future__ import annotations

import hashlib
import re
from uuid import UUID

Identifier = int | str | UUID

# What the keys of each sort of object begin with.
BATCHES, ENTRIES, TEXTS, MASKS, PROBES = "batches/", "cache/", "texts/", "masks/", "probe/"

# How keys are read again: see `writer_of`, `text_of` and `entry_of`.
_WRITER = re.compile(
    rf"{BATCHES}\d+/jobs/(\d+)/attempts/(\d+)/\w+\.\w+|{ENTRIES}[0-9a-f]{{2}}/[0-9a-f]{{64}}/(\d+)-(\d+)\.safetensors"
)
_TEXT = re.compile(rf"{TEXTS}[0-9a-f]{{2}}/[0-9a-f]{{64}}/([0-9a-f]{{64}})\.safetensors")
_MASK = re.compile(rf"{MASKS}[0-9a-f]{{2}}/([0-9a-f]{{64}})/[0-9a-f]{{64}}\.safetensors")

_PART = re.compile(r"[A-Za-z0-9_-]{1,128}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def video_key(batch_id: Identifier, job_id: Identifier, attempt: int) -> str:
    """The key of a job's MP4."""
    return f"{_attempt(batch_id, job_id, attempt)}/video.mp4"


def latents_key(batch_id: Identifier, job_id: Identifier, attempt: int) -> str:
    """The key of a job's final latents."""
    return f"{_attempt(batch_id, job_id, attempt)}/latents.safetensors"


def checkpoint_key(batch_id: Identifier, job_id: Identifier, attempt: int) -> str:
    """The key of what an attempt had computed when it was stopped."""
    return f"{_attempt(batch_id, job_id, attempt)}/checkpoint.safetensors"


def entry_key(domain_key: str, job_id: Identifier, attempt: int) -> str:
    """The key of the cache entry that a job left; `domain_key` is the sha256, in hex, of what entries must share."""
    return f"{_below(ENTRIES, domain_key)}{_part(job_id)}-{_part(attempt)}.safetensors"


def text_key(encoder: str, text: str) -> str:
    """The key of a cleaned text's features; `encoder` is the sha256, in hex, of all that they depend on beside it."""
    return f"{_below(TEXTS, encoder)}{hashlib.sha256(text.encode()).hexdigest()}.safetensors"


def mask_key(entry: str, asked: str) -> str:
    """The key of a region in an entry's video. `entry` is the sha256, in hex, of its object; `asked` the question.

    The entry stands first: its masks go with it.
    """
    return f"{_below(MASKS, entry)}{hashlib.sha256(asked.encode()).hexdigest()}.safetensors"


def writer_of(key: str) -> tuple[int, int] | None:
    """The job and the attempt that wrote a video, latents, a checkpoint or an entry; None for any other key."""
    found = _WRITER.fullmatch(key)
    if found is None:
        return None
    job, attempt = (part for part in found.groups() if part is not None)
    return int(job), int(attempt)


def text_of(key: str) -> str | None:
    """The sha256 (hex) of the text whose features lie there; None for any other key."""
    found = _TEXT.fullmatch(key)
    return None if found is None else found[1]


def entry_of(key: str) -> str | None:
    """The sha256 (hex) of the entry whose mask lies there; None for any other key."""
    found = _MASK.fullmatch(key)
    return None if found is None else found[1]


def batch_prefix(batch_id: Identifier) -> str:
    """What the keys of all of a batch's objects begin with."""
    return f"{BATCHES}{_part(batch_id)}/"


def _below(prefix: str, sha256: str) -> str:
    if not _SHA256.fullmatch(sha256):
        raise ValueError(f"not a sha256 in lower-case hex: {sha256!r}")
    return f"{prefix}{sha256[:2]}/{sha256}/"


def _attempt(batch_id: Identifier, job_id: Identifier, attempt: int) -> str:
    return f"{batch_prefix(batch_id)}jobs/{_part(job_id)}/attempts/{_part(attempt)}"


def _part(value: Identifier) -> str:
    text = str(value)
    if not _PART.fullmatch(text):
        raise ValueError(f"not usable in an object key: {text!r}")
    return text
