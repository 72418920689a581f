"""What a step, a job and an object cost in a domain: by finished jobs' traces, else as shipped, else unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from sqlalchemy import Connection, text

from chorus_batch.jobs.cards.card import ModelCard
from chorus_batch.jobs.parameters import Parameters

NEWEST = 1000  # traces that are looked at
FEWEST = 3  # computed jobs from which on their median says something
RESULTS = ("miss", "semantic", "exact")


@dataclass(frozen=True)
class Range:
    """A figure with what it may turn out to be, and what that comes from."""

    low: float
    expected: float
    high: float
    why: str = ""

    @classmethod
    def exactly(cls, value: float, why: str = "") -> Range:
        """A figure that is known."""
        return cls(value, value, value, why)

    @classmethod
    def of_sample(cls, values: Sequence[float], why: str = "") -> Range | None:
        """Median and quartiles; None of nothing."""
        if not len(values):
            return None
        low, middle, high = np.quantile(np.asarray(values, np.float64), (0.25, 0.5, 0.75))
        return cls(float(low), float(middle), float(high), why)


def times(figure: Range | None, factor: float | None) -> Range | None:
    """A figure of so many; None of what isn't known."""
    if figure is None or factor is None:
        return None
    return Range(figure.low * factor, figure.expected * factor, figure.high * factor, figure.why)


@dataclass(frozen=True)
class Costs:
    """Of one domain. None: nothing is known, and nothing is invented.

    tokens_per_step: through the transformer, both branches of the guidance together. step_share: of them, what a plain
    run computes (less than 1 with a step cache). region_share: what a step computes that is limited to a region.
    seconds_per_token: of denoising. beside: seconds of a job besides denoising, by what the cache gave it, from claim
    to commit; held: those of them that keep the device or the worker from another job. Bytes are of one object;
    `entry_step` of one latent kept in an entry.
    """

    basis: str
    traces: int = 0
    tokens_per_step: float | None = None
    step_share: float = 1.0
    region_share: Range = Range(0.2, 0.5, 0.9, "not measured yet")
    seconds_per_token: Range | None = None
    beside: Mapping[str, Range] = field(default_factory=dict)
    held: Mapping[str, Range] = field(default_factory=dict)
    video_bytes: Range | None = None
    latents_bytes: Range | None = None
    entry_step_bytes: Range | None = None


UNKNOWN = Costs("unknown: too few jobs of this model were finished here")

# Of the built-in model at its own size: one worker with one thread on a core of a shared virtual machine. Another one
# may take half as long or twice: the range says so.
_SHIPPED = "as shipped, of one CPU core; another may take half as long or twice"


def _ours(value: float) -> Range:
    return Range(value / 2, value, value * 2, _SHIPPED)


BUILTIN_TOKENS = 192  # of a video of 64x64 pixels and 9 frames, which the following bytes are of
BUILTIN = Costs(
    basis=f"{_SHIPPED}: too few jobs of this model were finished here",
    tokens_per_step=BUILTIN_TOKENS,
    region_share=Range(0.2, 0.5, 0.9, _SHIPPED),
    seconds_per_token=_ours(1.6e-4),
    beside={"miss": _ours(0.2), "semantic": _ours(0.2), "exact": _ours(0.02)},
    held={"miss": _ours(0.04), "semantic": _ours(0.05), "exact": _ours(0.02)},
    video_bytes=Range(2_500, 5_000, 15_000, _SHIPPED),
    latents_bytes=Range.exactly(49_480, _SHIPPED),
    entry_step_bytes=Range.exactly(24_960, _SHIPPED),
)


@dataclass(frozen=True)
class Made:
    """The trace of one finished job, as far as it tells costs."""

    width: int
    height: int
    frames: int
    guided: bool
    step_cache: str
    result: str  # miss, semantic, exact
    k1: int
    k2: int
    steps_total: int
    tokens_total: int
    tokens_computed: int
    denoise: float  # seconds
    held: float  # seconds in which the worker could begin no other job, denoising among them
    seconds: float  # from claim to commit; publishing overlaps the next job
    video_bytes: int
    latents_bytes: int

    @property
    def size(self) -> tuple[int, int, int, str]:
        """What tokens per step and seconds per token follow from, apart from guidance."""
        return self.width, self.height, self.frames, self.step_cache


def fitted(parameters: Parameters, made: Sequence[Made], entry_steps: Sequence[float] = ()) -> Costs:
    """The costs of jobs with such parameters, from finished jobs of the same model on the same kind of device.

    Jobs of the same size count alone if there are enough; else those of other sizes tell seconds per token (attention
    makes them rise with the size: the range says by how much at most) and nothing about objects' bytes.
    `entry_steps`: bytes per kept latent of the model's entries of this size. UNKNOWN if there are too few of any.
    """
    own = (parameters.width, parameters.height, parameters.frames, parameters.step_cache)
    same = [one for one in made if one.size == own]
    near = [one for one in same if one.result != "exact"]
    if len(near) >= FEWEST:
        return _measured(parameters, same, near, entry_steps)
    others = [one for one in made if one.result != "exact" and one.step_cache == parameters.step_cache]
    if len(others) >= FEWEST:
        return _transferred(parameters, others)
    return UNKNOWN


def _measured(
    parameters: Parameters, made: Sequence[Made], computed: Sequence[Made], entry_steps: Sequence[float]
) -> Costs:
    why = f"quartiles of {len(computed)} traces"
    misses = [one for one in computed if one.result == "miss"]
    regional = [one for one in computed if one.k2 > one.k1 and one.step_cache == "none"]
    shares = [_region_share(one) for one in regional]
    return Costs(
        basis=f"{len(computed)} traces of this model at this size",
        traces=len(computed),
        tokens_per_step=_tokens_per_step(computed[0]) * _branches(parameters.guidance_scale > 1),
        step_share=float(np.median([one.tokens_computed / one.tokens_total for one in misses])) if misses else 1.0,
        region_share=Range.of_sample(shares, f"quartiles of {len(shares)} traces") or Costs("").region_share,
        seconds_per_token=Range.of_sample([one.denoise / one.tokens_computed for one in computed], why),
        beside=_by_result(made, [one.seconds - one.denoise for one in made]),
        held=_by_result(made, [one.held - one.denoise for one in made]),
        video_bytes=_of_other_prompts(Range.of_sample([one.video_bytes for one in computed], why)),
        latents_bytes=Range.of_sample([one.latents_bytes for one in computed], why),
        entry_step_bytes=Range.of_sample(entry_steps, f"quartiles of {len(entry_steps)} entries"),
    )


def _of_other_prompts(seen: Range | None) -> Range | None:
    """How well a video compresses is a matter of what it shows: the built-in model's differ by a factor of 2.5."""
    if seen is None:
        return None
    return Range(seen.low / 3, seen.expected, 3 * seen.high, f"{seen.why}; other prompts may compress otherwise")


def _transferred(parameters: Parameters, made: Sequence[Made]) -> Costs:
    asked = parameters.width * parameters.height * ((parameters.frames - 1) // 4 + 1)
    ratios = np.array([asked / (one.width * one.height * ((one.frames - 1) // 4 + 1)) for one in made])
    tokens = np.median([_tokens_per_step(one) * ratio for one, ratio in zip(made, ratios, strict=True)])
    rate = Range.of_sample([one.denoise / one.tokens_computed for one in made])
    beside = Range.of_sample([one.seconds - one.denoise for one in made])
    assert rate is not None and beside is not None
    # Attention's share of a step is unknown: between none of it and all of it.
    growth = sorted((1.0, float(np.median(ratios))))
    why = f"{len(made)} traces of other sizes; attention's share of a step isn't known"
    scaled = Range(beside.low * growth[0], beside.expected * float(np.median(ratios)), beside.high * growth[1], why)
    return Costs(
        basis=f"{len(made)} traces of this model at other sizes",
        traces=len(made),
        tokens_per_step=float(tokens) * _branches(parameters.guidance_scale > 1),
        seconds_per_token=Range(rate.low * growth[0], rate.expected, rate.high * growth[1], why),
        beside=dict.fromkeys(RESULTS, scaled),
        held=dict.fromkeys(RESULTS, scaled),
    )


def _tokens_per_step(one: Made) -> float:
    return one.tokens_total / one.steps_total / _branches(one.guided)


def _branches(guided: bool) -> int:
    return 2 if guided else 1


def _region_share(one: Made) -> float:
    per_step = one.tokens_total / one.steps_total
    whole = (one.steps_total - one.k2) * per_step
    return float(np.clip((one.tokens_computed - whole) / ((one.k2 - one.k1) * per_step), 0.0, 1.0))


def _by_result(made: Sequence[Made], values: Sequence[float]) -> dict[str, Range]:
    """Of each result; where one was never seen a computed one stands in for it."""
    found: dict[str, Range] = {}
    for result in RESULTS:
        own = [max(value, 0.0) for one, value in zip(made, values, strict=True) if one.result == result]
        if (spread := Range.of_sample(own, f"quartiles of {len(own)} traces")) is not None:
            found[result] = spread
    spare = found.get("semantic") or found["miss"]
    linked = Range(0.0, 0.0, spare.expected, "no linked job was seen yet")
    return {"miss": spare, "semantic": found.get("miss", spare), "exact": linked} | found


def measured(
    connection: Connection, domain_id: int, parameters: Parameters, card: ModelCard, made: Sequence[Made]
) -> Costs:
    """The costs of a domain from the model's newest traces; the shipped ones of the model if they're too few."""
    found = fitted(parameters, made, _entry_steps(connection, domain_id))
    return shipped(card, parameters) if found.traces == 0 else found


def of_domains(
    connection: Connection, cards: Sequence[ModelCard], domain_ids: Sequence[int], domains: Sequence[Parameters]
) -> list[Costs]:
    """The costs of each domain, whose model's card stands at the same place."""
    traces = {fingerprint: newest(connection, card) for fingerprint, card in {c.fingerprint: c for c in cards}.items()}
    return [
        measured(connection, domain_id, parameters, card, traces[card.fingerprint])
        for card, domain_id, parameters in zip(cards, domain_ids, domains, strict=True)
    ]


def newest(connection: Connection, card: ModelCard) -> list[Made]:
    """The newest traces of a model, of the device that made the newest one."""
    query = """
        WITH newest AS MATERIALIZED (
            SELECT d.width, d.height, d.frames, d.guidance_scale > 1 AS guided, d.step_cache,
                g.cache_result::text AS result, g.k1, g.k2, g.steps_total, g.tokens_total, g.tokens_computed,
                coalesce((g.seconds->>'denoise')::float8, 0) AS denoise,
                (SELECT coalesce(sum(spent::float8), 0) FROM jsonb_each_text(g.seconds) AS s(phase, spent)
                    WHERE phase NOT IN ('mux', 'upload')) AS held,
                g.seconds_total, g.video_bytes, g.latents_bytes, g.backend->>'device_name' AS device,
                row_number() OVER (ORDER BY j.finished_at DESC, j.id DESC) AS age
            FROM jobs j JOIN generations g ON g.job_id = j.id JOIN domains d ON d.id = j.domain_id
            WHERE d.fingerprint = :fingerprint AND d.dtype = :dtype AND j.outcome = 'done'
            ORDER BY j.finished_at DESC, j.id DESC LIMIT :newest
        )
        SELECT * FROM newest
        WHERE result = 'exact' OR (tokens_computed > 0 AND tokens_total > 0 AND device IS NOT DISTINCT FROM
            (SELECT device FROM newest WHERE result <> 'exact' ORDER BY age LIMIT 1))
        ORDER BY age
    """
    values = {"fingerprint": card.fingerprint, "dtype": card.dtype, "newest": NEWEST}
    return [
        Made(
            row.width,
            row.height,
            row.frames,
            row.guided,
            row.step_cache,
            row.result,
            row.k1,
            row.k2,
            row.steps_total,
            row.tokens_total,
            row.tokens_computed,
            row.denoise,
            row.held,
            row.seconds_total,
            row.video_bytes,
            row.latents_bytes,
        )
        for row in connection.execute(text(query), values)
    ]


def _entry_steps(connection: Connection, domain_id: int) -> list[float]:
    """Bytes per kept latent of the newest entries of the domain's model, size and policy."""
    query = """
        SELECT e.size::float8 / cardinality(e.steps) AS bytes
        FROM cache_entries e JOIN domains d ON d.id = e.domain_id, domains own
        WHERE own.id = :domain AND cardinality(e.steps) > 0
            AND (d.fingerprint, d.dtype, d.width, d.height, d.frames, d.policy)
                = (own.fingerprint, own.dtype, own.width, own.height, own.frames, own.policy)
        ORDER BY e.id DESC LIMIT 200
    """
    return list(connection.execute(text(query), {"domain": domain_id}).scalars())


def shipped(card: ModelCard, parameters: Parameters) -> Costs:
    """What is known of a model before its first run here: something of the built-in ones, nothing of others."""
    if card.weights is not None or parameters.step_cache != "none":
        return UNKNOWN
    tokens = ((parameters.frames - 1) // 4 + 1) * (parameters.height // 8) * (parameters.width // 8)
    size = tokens / BUILTIN_TOKENS
    return replace(
        BUILTIN,
        tokens_per_step=tokens * _branches(parameters.guidance_scale > 1),
        video_bytes=times(BUILTIN.video_bytes, size),
        latents_bytes=times(BUILTIN.latents_bytes, size),
        entry_step_bytes=times(BUILTIN.entry_step_bytes, size),
    )
