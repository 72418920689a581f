"""Batches of the same rows side by side: what each computed, how long it took, and what its videos show. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from chorus_batch.jobs.errors import UsageError


@dataclass(frozen=True, slots=True)
class Made:
    """One job of a batch, finished or not."""

    prompt_key: bytes
    seed: int
    fps: int
    policy: str
    step_cache: str
    cache_result: str | None  # miss, exact or semantic; None: it isn't done
    tokens: int  # that went through the transformer, over all passes
    denoise_seconds: float
    scores: Mapping[str, bool] | None  # attribute -> whether the video shows it; None: nobody can tell


@dataclass(frozen=True)
class Batch:
    """A batch and its jobs in row order."""

    id: int
    name: str
    jobs: Sequence[Made]


@dataclass(frozen=True)
class Figures:
    """One batch, over the jobs that all of the batches finished. Shares lie in 0..1.

    `hits` are semantic and exact ones, as in the views. What is said of hits alone is said of semantic ones: an exact
    hit is a link, and neither computes nor changes anything. None: there is nothing to divide by, or nobody scored the
    videos. A video is right if it shows all of its attributes; one without scores counts neither way.
    """

    batch_id: int
    batch: str
    policies: tuple[str, ...]
    step_caches: tuple[str, ...]
    jobs: int  # of the batch
    matched: int
    hits: int
    semantic_hits: int
    exact_hits: int
    hit_rate: float
    tokens: int  # through the transformer, over all passes
    tokens_share: float | None  # of the baseline's
    denoise_seconds: float
    speedup: float | None  # the baseline's denoising seconds, divided by this batch's
    speedup_hits: float | None  # the same over this batch's hits
    scored: int  # videos that have scores
    accuracy: float | None  # share of videos that are right
    accuracy_hits: float | None
    baseline_accuracy_hits: float | None  # of the baseline's videos of the same jobs
    spoiled: float | None  # share of hits that are wrong and were right in the baseline
    mended: float | None  # share of hits that are right and were wrong in the baseline
    attributes: Mapping[str, float]  # attribute -> share of videos that show it
    attributes_hits: Mapping[str, float]


_Pairs: TypeAlias = Sequence[tuple[Made, Made]]  # the baseline's job and the batch's own
_Key: TypeAlias = tuple[bytes, int, int, int]


def compare(batches: Sequence[Batch]) -> list[Figures]:
    """Figures of each batch; the first is the baseline.

    Jobs of two batches match if prompt, seed and frame rate are equal; of several such jobs of a batch, the first
    matches the first of the other. Raises UsageError if no job was finished by all of the batches.
    """
    made = [_by_key(batch.jobs) for batch in batches]
    matched = [key for key in made[0] if all(_is_done(jobs.get(key)) for jobs in made)]
    if not matched:
        raise _nothing_matches(batches, made)
    return [
        _figures(batch, [(made[0][key], own[key]) for key in matched]) for batch, own in zip(batches, made, strict=True)
    ]


def _by_key(jobs: Iterable[Made]) -> dict[_Key, Made]:
    seen: Counter[tuple[bytes, int, int]] = Counter()
    found: dict[_Key, Made] = {}
    for job in jobs:
        request = (job.prompt_key, job.seed, job.fps)
        # Unfinished ones are counted too: a copy that failed must not shift those behind it.
        found[*request, seen[request]] = job
        seen[request] += 1
    return found


def _is_done(job: Made | None) -> bool:
    return job is not None and job.cache_result is not None


def _nothing_matches(batches: Sequence[Batch], made: Sequence[Mapping[_Key, Made]]) -> UsageError:
    names = ", ".join(f"{batch.id} ({batch.name})" for batch in batches)
    for batch in batches:
        if not any(map(_is_done, batch.jobs)):
            hint = f"`chorus-batch wait {batch.id}` waits for it"
            return UsageError(f"batch {batch.id} ({batch.name}) has no finished job", code="nothing_matches", hint=hint)
    hint = "wait for them to finish"
    if not set(made[0]).intersection(*made[1:]):
        hint = (
            "batches to be compared need the same prompts and seeds: give the file a column of seeds, or submit it each"
            " time with --seed-policy hash"
        )
    return UsageError(f"batches {names}: no job was finished by all of them", code="nothing_matches", hint=hint)


def _figures(batch: Batch, pairs: _Pairs) -> Figures:
    own = [job for _, job in pairs]
    hits = [(base, job) for base, job in pairs if job.cache_result == "semantic"]
    exact = sum(job.cache_result == "exact" for job in own)
    both = [(base, job) for base, job in hits if base.scores and job.scores]
    tokens = sum(job.tokens for job in own)
    return Figures(
        batch_id=batch.id,
        batch=batch.name,
        policies=tuple(sorted({job.policy for job in own})),
        step_caches=tuple(sorted({job.step_cache for job in own})),
        jobs=len(batch.jobs),
        matched=len(pairs),
        hits=len(hits) + exact,
        semantic_hits=len(hits),
        exact_hits=exact,
        hit_rate=(len(hits) + exact) / len(pairs),
        tokens=tokens,
        tokens_share=_share(tokens, sum(base.tokens for base, _ in pairs)),
        denoise_seconds=sum(job.denoise_seconds for job in own),
        speedup=_speedup(pairs),
        speedup_hits=_speedup(hits),
        scored=sum(bool(job.scores) for job in own),
        accuracy=_accuracy(own),
        accuracy_hits=_accuracy([job for _, job in hits]),
        baseline_accuracy_hits=_accuracy([base for base, _ in hits]),
        spoiled=_share(sum(_is_right(base) and not _is_right(job) for base, job in both), len(both)),
        mended=_share(sum(_is_right(job) and not _is_right(base) for base, job in both), len(both)),
        attributes=_attributes(own),
        attributes_hits=_attributes([job for _, job in hits]),
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _speedup(pairs: _Pairs) -> float | None:
    return _share(sum(base.denoise_seconds for base, _ in pairs), sum(job.denoise_seconds for _, job in pairs))


def _is_right(job: Made) -> bool:
    return bool(job.scores) and all((job.scores or {}).values())


def _accuracy(jobs: Sequence[Made]) -> float | None:
    return _share(sum(map(_is_right, jobs)), sum(bool(job.scores) for job in jobs))


def _attributes(jobs: Sequence[Made]) -> dict[str, float]:
    shown: dict[str, list[bool]] = {}
    for job in jobs:
        for attribute, right in (job.scores or {}).items():
            shown.setdefault(attribute, []).append(bool(right))
    return {attribute: sum(right) / len(right) for attribute, right in sorted(shown.items())}
