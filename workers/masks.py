"""Masks through the object store: each region of an entry is looked for once, whoever needs it first."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, replace

import torch

from chorus_batch.chorus.differ import Difference
from chorus_batch.chorus.errors import CorruptMask
from chorus_batch.chorus.grounded import has_place, phrases
from chorus_batch.chorus.masks import Mask, pack, unpack
from chorus_batch.chorus.segment import Segmenter, Source
from chorus_batch.jobs import keys
from chorus_batch.jobs.errors import ChorusBatchError, ObjectCorrupt, ObjectMissing
from chorus_batch.jobs.storage import ObjectStore

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Taken:
    """Where a region came from: `store`, or `made` here and now; and the seconds that it took."""

    origin: str
    seconds: float


class StoredMasks:
    """A segmenter with a memory that all workers share."""

    def __init__(self, segmenter: Segmenter, store: ObjectStore, fingerprint: str) -> None:
        """`fingerprint`: sha256 (hex) of all that a region depends on beside the entry and the words."""
        self._segmenter = segmenter
        self._store = store
        self._fingerprint = fingerprint
        self._taken: Taken | None = None

    def region(self, source: Source, difference: Difference) -> torch.Tensor | None:
        """M_base, bool [T, h, w]: the stored one, else a new one, which is stored. Raises what the segmenter raises.

        What comes from a source whose video is lost isn't kept: it's the evidence's, and the video may come again.
        """
        if not source.entry or not has_place(difference):
            return self._segmenter.region(source, difference)
        began = time.perf_counter()
        found = self._fetched(source, difference)
        origin = "store" if found is not None else "made"
        if found is None:
            video = source.video() if source.video is not None else None
            found = Mask(self._segmenter.region(replace(source, video=lambda: video), difference))
            if video is not None:
                self._keep(source, difference, found)
        self._taken = Taken(origin, time.perf_counter() - began)
        return found.region

    def is_stored(self, source: Source, difference: Difference) -> bool:
        """Whether the region is there already."""
        return self._store.exists(self._key(source, difference))

    def taken(self) -> Taken | None:
        """Of the region that was asked for since the last call of this; None if none was."""
        taken, self._taken = self._taken, None
        return taken

    def _fetched(self, source: Source, difference: Difference) -> Mask | None:
        try:
            return unpack(self._store.get(self._key(source, difference)), self._asked(source, difference))
        except ObjectMissing:
            return None
        except (ObjectCorrupt, CorruptMask) as error:
            log.warning("a mask is made again: %s", error)
            return None

    def _keep(self, source: Source, difference: Difference, found: Mask) -> None:
        data = pack(found, self._asked(source, difference))
        try:
            self._store.put(self._key(source, difference), data, "application/octet-stream")
        except ChorusBatchError as error:
            # It cost seconds of a device: who made it goes on with it all the same.
            log.warning("a mask wasn't stored: %s", error)

    def _asked(self, source: Source, difference: Difference) -> str:
        words = phrases(source.prompt, difference)
        return json.dumps([source.entry, self._fingerprint, words, difference.scope.value])

    def _key(self, source: Source, difference: Difference) -> str:
        return keys.mask_key(source.entry, self._asked(source, difference))
