"""Masks ahead of use, in a process of their own: whoever denoises then finds them in the store.

What there is to do is worked out from the database each time: a lost message, or a killed process, costs nothing but
time, and the same mask made twice is the same object.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby

from chorus_batch.chorus.llm_differ import LlmDiffer
from chorus_batch.chorus.policy import ReusePolicy
from chorus_batch.chorus.segment import Source, Video
from chorus_batch.jobs import cache, mask_work
from chorus_batch.jobs.cards.card import load_card
from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.errors import ObjectCorrupt, ObjectMissing
from chorus_batch.jobs.mask_work import Asking
from chorus_batch.jobs.parameters import clean_prompt
from chorus_batch.workers.masks import StoredMasks
from chorus_batch.workers.models import generation_settings, token_grid
from chorus_batch.workers.runtime import Runtime
from chorus_batch.workers.video import VideoError, read_mp4

log = logging.getLogger(__name__)

AHEAD = 512  # followers that are looked at: those that will be claimed next


class MaskMaker:
    """Makes the masks that the next followers will ask for."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._seen: set[int] = set()  # followers that were looked at, as long as they are among the next
        self._policies: dict[str, ReusePolicy] = {}

    def work(self) -> int:
        """Until nothing is left, or the process is told to stop. Returns how many masks were made.

        Raises DependencyDown, and EngineError where the segmenter can't be loaded.
        """
        made = 0
        while fresh := self._fresh():
            for _, group in groupby(sorted(fresh, key=lambda each: each.entry), lambda each: each.entry):
                if self._runtime.stopping.is_set():
                    return made
                made += self._of_entry(list(group))
        return made

    def _fresh(self) -> list[Asking]:
        with transaction(self._runtime.database) as connection:
            found = mask_work.upcoming(connection, AHEAD)
        self._seen &= {each.job_id for each in found}
        return [each for each in found if each.job_id not in self._seen]

    def _of_entry(self, asking: Sequence[Asking]) -> int:
        """The masks of one entry that aren't there yet, with one look at its video."""
        first = asking[0]
        # Whatever comes of them: what fails is made, or told, by whoever needs it.
        self._seen.update(each.job_id for each in asking)
        policy = self._policy(first)
        masks, prompt = policy.segmenter, clean_prompt(first.source_prompt)
        if not isinstance(masks, StoredMasks):  # the evidence in its place, of which the runtime has told
            return 0
        pairs = [(prompt, clean_prompt(each.prompt)) for each in asking]
        if isinstance(policy.differ, LlmDiffer):
            policy.differ.compare_many(pairs)
        source = Source(prompt, None, entry=first.entry)
        missing = {}
        for (_, target), each in zip(pairs, asking, strict=True):
            settings = generation_settings(each.domain, each.fps)
            difference = policy.sought(prompt, target, each.similarity, settings)
            if difference is not None and not masks.is_stored(source, difference):
                missing[difference.source_spans, difference.scope] = difference
        if not missing:
            return 0
        video = self._video(first)
        made = 0
        for difference in missing.values() if video is not None else ():
            if self._runtime.stopping.is_set():
                break
            masks.region(Source(prompt, None, lambda: video, first.entry), difference)
            made += 1
        return made

    def _video(self, asking: Asking) -> Video | None:
        grid = token_grid(load_card(asking.domain.model, self._runtime.settings.models_folder), asking.domain)
        if grid is None:
            return None
        try:
            with transaction(self._runtime.database) as connection:
                stored = cache.video_of(connection, asking.source_job_id)
            if stored is None:
                raise ObjectMissing(f"job {asking.source_job_id} has no video")
            return Video(read_mp4(self._runtime.store.get(stored.key, stored)), grid)
        except (ObjectMissing, ObjectCorrupt, VideoError) as error:
            log.warning("job %s: no masks of its video: %s", asking.source_job_id, error)
            return None

    def _policy(self, asking: Asking) -> ReusePolicy:
        """How the model's latents are reused; the engine itself isn't needed, and not loaded."""
        model = asking.domain.model
        if model not in self._policies:
            card = load_card(model, self._runtime.settings.models_folder)
            self._policies[model] = self._runtime.policies(card)[asking.domain.policy]
        return self._policies[model]
