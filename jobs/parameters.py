"""What is asked of the model besides the prompt, and the hash that decides what may be reused for what."""

from __future__ import annotations

import hashlib
import html
import json
import math
import re
import unicodedata
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chorus_batch.jobs.cards.card import ModelCard

# Part of every domain key: raise it when the engine changes so that old latents no longer continue as they began.
ENGINE_VERSION = 2

POLICIES = ("none", "nirvana", "chorus")  # what each reuses: models.Policy
STEP_CACHES = ("none", "teacache", "magcache", "taylorseer", "pab", "fastercache", "fbcache", "seacache")
FEWEST_CACHED_STEPS = 10  # with fewer, neighbouring steps differ too much for any of them to stand in for another

# Text that `ftfy.fix_text` and `html.unescape` change in nothing but white space and curly quotes, and which takes a
# path about 100 times faster: ASCII without `&` and control characters, with the accents and punctuation of ordinary
# prose one at a time (ftfy suspects mojibake only where two non-ASCII characters meet), or with East Asian text.
_ASCII = "[ -%'-~\t\n\r]"
_PROSE = "[\xdf-\xf6\xf8-\xff\u2013\u2014\u2018\u2019\u201c\u201d\u2026]"
_EAST_ASIAN = "[ -%'-~\t\n\r\u3001\u3002\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3]"
_PLAIN = re.compile(f"{_ASCII}*(?:{_PROSE}{_ASCII}+)*{_PROSE}?|{_EAST_ASIAN}*")
_STRAIGHT = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Normalized values: sizes in pixels, `frames` is 4k+1, `negative_prompt` is cleaned.

    Raises ValueError for a value that no model can run.
    """

    model: str
    width: int
    height: int
    frames: int
    fps: int
    steps: int
    guidance_scale: float
    shift: float
    scheduler: str
    negative_prompt: str
    policy: str = "chorus"  # what a similar request's latents are used for
    step_cache: str = "none"  # what a request reuses of its own earlier steps

    def __post_init__(self) -> None:
        for name in ("width", "height", "frames", "fps", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}")
        if self.frames % 4 != 1:
            raise ValueError(f"frames is {self.frames}, not of the form 4k+1")
        for name in ("guidance_scale", "shift"):
            value = float(getattr(self, name))
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value}")
            # 5 and 5.0 are the same request and must give the same key.
            object.__setattr__(self, name, value + 0.0)
        for name, known in (("policy", POLICIES), ("step_cache", STEP_CACHES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, none of {', '.join(known)}")
        if self.step_cache != "none" and self.steps < FEWEST_CACHED_STEPS:
            raise ValueError(f"step_cache is {self.step_cache!r} with {self.steps} steps")


def clean_prompt(text: str) -> str:
    """The text as the model reads it: exactly what `prompt_clean` of diffusers' Wan pipeline makes of it with ftfy."""
    if _PLAIN.fullmatch(text):
        return " ".join((text if text.isascii() else text.translate(_STRAIGHT)).split())
    import ftfy  # takes a quarter of a second, which `--help` can't spare

    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text.strip()).strip()


def domain_key(parameters: Parameters, card: ModelCard, embedder_space: str) -> str:
    """sha256 (hex) over everything that must be equal for one video's latents to be of use to another.

    That is the domain (README, "Method"). The frame rate isn't part of it: latents don't depend on it.
    """
    if parameters.model != card.name:
        raise ValueError(f"parameters are for {parameters.model!r}, the card is {card.name!r}")
    values = asdict(parameters)
    del values["fps"]
    parts = {
        **values,
        "negative_prompt": unicodedata.normalize("NFC", parameters.negative_prompt),
        "fingerprint": card.fingerprint,
        "dtype": card.dtype,
        "loras": [],  # one that belongs to a model is part of its fingerprint
        "embedder": embedder_space,
        "engine": ENGINE_VERSION,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
