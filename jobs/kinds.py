"""Which kind of difference the engine will find between rows and their sources: asked of its differ, in a process."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

log = logging.getLogger(__name__)

ASKED = 5_000  # pairs, in a second or two; the kinds of more are drawn from theirs


Synonyms = Sequence[Sequence[str]]


def kinds(pairs: Sequence[tuple[str, str]], synonyms: Synonyms = ()) -> list[str | None]:
    """The kind of each difference, as `parts` has it first."""
    return [each[0] if each else None for each in parts(pairs, synonyms)]


def parts(pairs: Sequence[tuple[str, str]], synonyms: Synonyms = ()) -> list[tuple[str, ...]]:
    """The kinds of each (source, target), by the lexical differ with the model's synonyms; none where it isn't there.

    The first is the difference's own kind; where that is "several" those that it consists of follow it. Of more than
    ASKED pairs a sample is asked, and the others are given kinds at the sample's rates: their sum is a good forecast, a
    single one isn't.
    """
    if not pairs:
        return []
    rng = np.random.default_rng(len(pairs))
    asked = np.arange(len(pairs))
    if len(pairs) > ASKED:
        asked = np.sort(rng.choice(len(pairs), ASKED, replace=False))
    lines = "".join(json.dumps(pairs[index]) + "\n" for index in asked.tolist())
    command = [sys.executable, "-m", "chorus_batch.workers.kinds", json.dumps(synonyms)]
    done = subprocess.run(command, check=False, input=lines, capture_output=True, text=True, encoding="utf-8")
    told = [tuple(line.split()) for line in done.stdout.splitlines()]
    if done.returncode or len(told) != len(asked):
        log.warning("the kinds of difference aren't known: %s", done.stderr.strip()[-500:])
        return [()] * len(pairs)
    if len(pairs) == len(told):
        return told
    found = [told[index] for index in rng.integers(len(told), size=len(pairs)).tolist()]
    for index, each in zip(asked.tolist(), told, strict=True):
        found[index] = each
    return found
