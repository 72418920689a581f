"""What a request takes from the source that was found for it: a pure decision, before anything is computed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from .config import GenerationSettings
from .differ import Differ, Difference, LexicalDiffer, Spans, token_indices
from .gains import NO_GAINS, Gains
from .regions import NoRegion, Regions, RegionSettings, build
from .request import Reuse
from .schedule import noise_levels
from .segment import Segmenter, Source
from .stages import Boundaries

REMEMBERED_REGIONS = 4096


class Policy(StrEnum):
    """How far reuse goes."""

    none = "none"  # everything is computed
    nirvana = "nirvana"  # stage 1 alone: the first steps are the source's
    chorus = "chorus"  # all three stages, and the tokens that differ amplified


@dataclass(frozen=True)
class Candidate:
    """A cached entry and how well its prompt matches: what `decide` chooses from."""

    entry_id: int | str
    similarity: float
    source: Source
    latents: Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class Decision:
    """What to reuse, None for nothing, and notes for the trace about what couldn't be had."""

    reuse: Reuse | None
    notes: tuple[str, ...] = ()


@dataclass
class ReusePolicy:
    """Boundaries, gains and regions of one model, with the differ and the segmenter that serve them."""

    policy: Policy
    boundaries: Boundaries
    gains: Gains
    regions: RegionSettings
    differ: Differ
    segmenter: Segmenter
    kind_gains: Mapping[str, Gains] = field(default_factory=dict)  # by kind of difference, where they're others
    quick: Differ = field(default_factory=LexicalDiffer)  # ranks sources: `differ` may be a model
    _known: OrderedDict[tuple[int | str, tuple[tuple[int, int], ...], str], Regions | NoRegion | None] = field(
        default_factory=OrderedDict
    )

    def kept_steps(self, settings: GenerationSettings) -> frozenset[int]:
        """The k whose x[k] a source has to keep for this policy."""
        levels = noise_levels(settings.steps, settings.shift)
        if self.policy is Policy.none:
            return frozenset()
        if self.policy is Policy.nirvana:
            return frozenset(row.k1 for row in self.boundaries.rows(settings.steps, levels)) - {0}
        return self.boundaries.kept_steps(settings.steps, levels)

    def depth(self, source: str, prompt: str, m: float, settings: GenerationSettings) -> tuple[int, int]:
        """(K1, K2) that a source promises at similarity `m` by its prompt alone: to rank sources before any is fetched.

        The nearest source isn't always the best: "moves left" is nearer to "moves right" than red to blue, and bears
        less.
        """
        if self.policy is Policy.none:
            return 0, 0
        difference = self.quick.compare(source, prompt) if self.policy is Policy.chorus else None
        return self._boundaries(m, settings, difference)

    def decide(
        self,
        prompt: str,
        offsets: Sequence[tuple[int, int]],
        settings: GenerationSettings,
        domain_key: str,
        candidate: Candidate,
    ) -> Decision:
        """(K1, K2), regions and amplified tokens for a prompt; `offsets` are its text slots' characters.

        The entry must hold x[k1]; steps of stage 2 that it doesn't hold are computed in full instead.
        """
        m, entry = candidate.similarity, candidate.entry_id
        if self.policy is Policy.none:
            return Decision(None)
        difference = self.differ.compare(candidate.source.prompt, prompt)
        if self.policy is Policy.nirvana:
            # What differs is for the record alone.
            k1, _ = self._boundaries(m, settings, None)
            reuse = Reuse(entry, domain_key, m, k1, k1, candidate.latents, difference=difference)
            return Decision(reuse if k1 else None)
        k1, k2 = self._boundaries(m, settings, difference)
        if k1 == 0:
            return Decision(None, (f"a difference of kind {difference.kind} isn't reused at m = {m:.3f}",))
        notes: list[str] = []
        regions = None
        if k2 > k1:
            missing = [k for k in range(k1 + 1, k2 + 1) if k not in candidate.latents]
            found = self._regions(candidate, difference) if not missing else None
            if isinstance(found, Regions):
                regions = found
            else:
                why = f"region {found.reason} ({found.share:.2f})" if isinstance(found, NoRegion) else "no region"
                notes.append(f"no stage 2: entry {entry} lacks steps {missing}" if missing else f"no stage 2: {why}")
                k2 = k1
        spans, gains = self._amplified(difference)
        tokens = token_indices(spans, offsets) if spans else ()
        reuse = Reuse(entry, domain_key, m, k1, k2, candidate.latents, regions, tokens, gains, difference)
        return Decision(reuse, tuple(notes))

    def sought(self, source: str, prompt: str, m: float, settings: GenerationSettings) -> Difference | None:
        """The difference whose region `decide` will ask for at similarity `m`; None if it will ask for none."""
        if self.policy is not Policy.chorus:
            return None
        difference = self.differ.compare(source, prompt)
        k1, k2 = self._boundaries(m, settings, difference)
        return difference if 0 < k1 < k2 else None

    def _boundaries(self, m: float, settings: GenerationSettings, difference: Difference | None) -> tuple[int, int]:
        """F of the kind; where several kinds differ, what all of them bear, and several together.

        Without a difference the general table's first stage alone.
        """
        steps, levels = settings.steps, noise_levels(settings.steps, settings.shift)
        if difference is None:
            k1, _ = self.boundaries.at(m, steps, levels)
            return k1, k1
        kinds = {difference.kind, *(kind for kind, _ in difference.parts)}
        found = [self.boundaries.at(m, steps, levels, kind.value) for kind in kinds]
        return min(k1 for k1, _ in found), min(k2 for _, k2 in found)

    def _amplified(self, difference: Difference) -> tuple[Spans, Gains]:
        """The words to amplify, and how: of the kinds that differ those with a gain; the mildest if there are more."""
        parts = [(spans, self.kind_gains.get(kind.value, self.gains)) for kind, spans in difference.parts]
        strong = [(spans, gains) for spans, gains in parts if spans and gains.key * gains.output > 1]
        if not strong:
            return difference.target_spans, NO_GAINS if parts else self.gains
        words = tuple(sorted(span for spans, _ in strong for span in spans))
        return words, min((gains for _, gains in strong), key=lambda gains: gains.key * gains.output)

    def _regions(self, candidate: Candidate, difference: Difference) -> Regions | NoRegion | None:
        """The regions of an entry's words, remembered: followers of one source often differ in the same words."""
        key = (candidate.entry_id, difference.source_spans, difference.scope.value)
        if key not in self._known:
            base = self.segmenter.region(candidate.source, difference)
            self._known[key] = None if base is None else build(base, self.regions)
            if len(self._known) > REMEMBERED_REGIONS:
                self._known.popitem(last=False)
        return self._known[key]
