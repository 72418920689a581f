"""Laws 4, 7 and 8 for stage 1 on the built-in model; determinism; every refusal."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from chorus_batch.chorus import checkpoint
from chorus_batch.chorus.config import GenerationSettings
from chorus_batch.chorus.cost import forward_flops, text_flops
from chorus_batch.chorus.differ import LexicalDiffer
from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.errors import (
    CheckpointMismatch,
    ConstantOutput,
    CorruptLatents,
    DomainMismatch,
    EngineError,
    MissingStep,
    NotFinite,
    RegionError,
    Stopped,
    UnsupportedSettings,
    WeightsError,
)
from chorus_batch.chorus.gains import Gains
from chorus_batch.chorus.latents import pack, unpack
from chorus_batch.chorus.policy import Candidate, Policy, ReusePolicy
from chorus_batch.chorus.regions import Regions, RegionSettings, build
from chorus_batch.chorus.request import Request, Result, Reuse
from chorus_batch.chorus.segment import EvidenceSegmenter, Source
from chorus_batch.chorus.stages import Boundaries
from chorus_batch.chorus.tiny.codec import LinearCodec
from chorus_batch.chorus.tiny.model import WEIGHTS

Make = Callable[..., Request]
EVERY = frozenset(range(5))


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Result:
    settings = GenerationSettings(64, 64, 9, 8, 4, 2.5, 3.0)
    request = Request("a red circle moves left over a gray background", 1, settings, "domain")
    return engine.generate(request, keep=EVERY)


def reuse_of(result: Result, k1: int, **changes: Any) -> Reuse:
    return replace(Reuse(41, "domain", 0.9, k1, k1, result.trajectory), **changes)


@contextmanager
def counting(engine: Engine) -> Iterator[list[int]]:
    """Tokens of each call of the first block."""
    seen: list[int] = []
    hook = engine.model.transformer.blocks[0].register_forward_hook(
        lambda module, inputs, output: seen.append(output.shape[1])
    )
    try:
        yield seen
    finally:
        hook.remove()


def test_the_same_request_twice_is_bit_identical(engine: Engine, plain: Result, request_of: Make) -> None:
    engine.generate(request_of("a blue square grows over a white background", seed=9))
    again = engine.generate(request_of(), keep=EVERY)
    assert torch.equal(again.latents, plain.latents)
    assert all(torch.equal(again.trajectory[k], plain.trajectory[k]) for k in EVERY)
    assert not torch.equal(engine.generate(request_of(seed=2)).latents, plain.latents)


def test_the_largest_seed_is_a_seed(engine: Engine, request_of: Make) -> None:
    largest = engine.generate(request_of(seed=2**63 - 1), keep={0}).trajectory[0]
    assert not torch.equal(largest, engine.generate(request_of(seed=2**63 - 2), keep={0}).trajectory[0])


def test_the_trajectory_is_the_callers_own(plain: Result) -> None:
    noise = torch.randn((16, 3, 16, 16), generator=torch.Generator("cpu").manual_seed(1))
    assert set(plain.trajectory) == EVERY
    assert torch.equal(plain.trajectory[0], noise)
    assert torch.equal(plain.trajectory[4], plain.latents)
    pointers = {t.untyped_storage().data_ptr() for t in [*plain.trajectory.values(), plain.latents]}
    assert len(pointers) == 6
    for latents in plain.trajectory.values():
        assert (latents.dtype, latents.shape) == (torch.float32, (16, 3, 16, 16))
        # An inference tensor couldn't be changed in place.
        assert not latents.is_inference()


@pytest.mark.parametrize("k1", range(5))
def test_its_own_trajectory_gives_the_plain_result(engine: Engine, plain: Result, request_of: Make, k1: int) -> None:
    """Law 4, through stored bytes too."""
    stored = unpack(pack(plain.trajectory, {})).latents
    result = engine.generate(request_of(), reuse_of(plain, k1, latents=stored))
    assert torch.equal(result.latents, plain.latents)


@pytest.mark.parametrize("scale", [2.5, 1.0])
@pytest.mark.parametrize("k1", [0, 1, 3, 4])
def test_the_trace_counts_what_ran(
    engine: Engine, plain: Result, request_of: Make, settings: GenerationSettings, k1: int, scale: float
) -> None:
    """Law 7."""
    passes = 2 if scale > 1 else 1
    request = request_of("a green circle moves left", settings=replace(settings, guidance_scale=scale))
    with counting(engine) as seen:
        trace = engine.generate(request, reuse_of(plain, k1)).trace
    assert trace.forward_passes == len(seen) == passes * (4 - k1)
    assert trace.tokens_computed == sum(seen)
    assert trace.tokens_total == passes * 4 * 192
    assert (trace.steps_skipped, trace.steps_computed, trace.steps_total) == (k1, 4 - k1, 4)
    assert (trace.k1, trace.k2) == (k1, k1)
    assert len(trace.step_seconds) == 4 - k1
    # The text is computed once, however many steps there are.
    text = passes * text_flops(engine.model.transformer.config, engine.model.text_slots)
    assert (trace.flops_total - text) * (4 - k1) == (trace.flops_computed - text) * 4
    assert trace.visible == (1.0,) * (4 - k1)
    assert (trace.cache_result, trace.entry, trace.m) == (("hit", 41, 0.9) if k1 else ("miss", None, None))


def test_a_hit_differs_from_source_and_from_plain(engine: Engine, plain: Result, request_of: Make) -> None:
    request = request_of("a green circle moves left over a gray background")
    hit = engine.generate(request, reuse_of(plain, 2), keep=EVERY)
    assert set(hit.trajectory) == {2, 3, 4}
    assert torch.equal(hit.trajectory[2], plain.trajectory[2])
    assert not torch.equal(hit.latents, plain.latents)
    assert not torch.equal(hit.latents, engine.generate(request).latents)


def test_the_trace_is_plain_data(engine: Engine, plain: Result) -> None:
    record = plain.trace.timed(decode=0.25, mux=0.5).as_dict()
    assert set(record["seconds"]) == {"encode", "denoise", "decode", "mux"}
    assert record["backend"]["device"] == "cpu"
    assert record["backend"]["dtype"] == "float32"
    assert record["backend"]["attention"] == "native"
    assert record["backend"]["threads"] == 1
    assert record["backend"]["fingerprint"] == engine.fingerprint
    assert record["prompt_tokens"] == 11
    assert record["peak_memory"] > 100e6
    assert sum(record["step_seconds"]) <= record["seconds"]["denoise"]


def test_a_prompt_beyond_the_slots_is_cut_and_told(engine: Engine, request_of: Make) -> None:
    trace = engine.generate(request_of("a red circle moves left " * 20)).trace
    assert trace.prompt_tokens == 102
    assert trace.prompt_truncated


@given(st.text(max_size=12))
def test_another_domain_is_never_reused(engine: Engine, plain: Result, domain: str) -> None:
    """Law 8 for the engine: whatever the other key is, nothing runs."""
    request = Request("a red circle", 1, GenerationSettings(64, 64, 9, 8, 4, 2.5, 3.0), "domain")
    assume(domain != "domain")
    with counting(engine) as seen, pytest.raises(DomainMismatch):
        engine.generate(request, reuse_of(plain, 2, domain_key=domain))
    assert seen == []


def test_a_step_that_was_not_stored_is_named(engine: Engine, plain: Result, request_of: Make) -> None:
    with pytest.raises(MissingStep, match="step 2"):
        engine.generate(request_of(), reuse_of(plain, 2, latents={1: plain.trajectory[1]}))


@pytest.mark.parametrize(("k1", "k2"), [(-1, 2), (3, 2), (2, 5), (5, 5)])
def test_boundaries_outside_the_steps_are_refused(
    engine: Engine, plain: Result, request_of: Make, k1: int, k2: int
) -> None:
    with pytest.raises(UnsupportedSettings, match="k1"):
        engine.generate(request_of(), reuse_of(plain, k1, k2=k2))


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(16, 3, 16, 15),
        torch.zeros(1, 16, 3, 16, 16),
        torch.zeros(16, 3, 16, 16, dtype=torch.int32),
        torch.full((16, 3, 16, 16), float("inf")),
    ],
)
def test_latents_that_cannot_be_a_source_are_refused(
    engine: Engine, plain: Result, request_of: Make, bad: torch.Tensor
) -> None:
    with pytest.raises(CorruptLatents):
        engine.generate(request_of(), reuse_of(plain, 2, latents={2: bad}))


@pytest.mark.parametrize("changes", [{"width": 128}, {"height": 32}, {"frames": 13}])
def test_other_sizes_are_refused(
    engine: Engine, request_of: Make, settings: GenerationSettings, changes: dict[str, int]
) -> None:
    with pytest.raises(UnsupportedSettings, match="builtin") as refused:
        engine.generate(request_of(settings=replace(settings, **changes)))
    assert refused.value.hint


def test_steps_to_keep_must_exist(engine: Engine, request_of: Make) -> None:
    with pytest.raises(UnsupportedSettings, match="keep"):
        engine.generate(request_of(), keep=frozenset({5}))


def test_it_stops_and_works_again(engine: Engine, plain: Result, request_of: Make) -> None:
    done: list[int] = []
    with pytest.raises(Stopped) as stopped:
        engine.generate(request_of(), should_stop=lambda: len(done) == 1, on_step=lambda step, steps: done.append(step))
    assert (stopped.value.step, stopped.value.code) == (1, "stopped")
    assert torch.equal(engine.generate(request_of()).latents, plain.latents)


@pytest.mark.parametrize(("value", "error"), [(float("nan"), NotFinite), (0.0, ConstantOutput)])
def test_a_broken_generation_is_a_coded_failure(
    engine: Engine, request_of: Make, value: float, error: type[EngineError]
) -> None:
    """Broken at the last step: a velocity that isn't finite, or one that leaves the same value everywhere."""
    calls = 0

    def breaking(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls < 7:
            return output
        if value != 0.0:
            return output * value
        # From x[3] to exactly zero in one Euler step: v = x / sigma, in patches as the blocks' last layer gives them.
        return (
            (latents[0] / torch.tensor(0.5, dtype=torch.float32))
            .unflatten(2, (8, 2))
            .unflatten(4, (8, 2))
            .permute(1, 2, 4, 3, 5, 0)
            .reshape(1, 192, 64)
        )

    latents: list[torch.Tensor] = [torch.empty(0)]
    seen = engine.model.transformer.patch_embedding.register_forward_pre_hook(
        lambda module, inputs: latents.__setitem__(0, inputs[0][0])
    )
    hook = engine.model.transformer.proj_out.register_forward_hook(breaking)
    try:
        with pytest.raises(error):
            engine.generate(request_of())
    finally:
        hook.remove()
        seen.remove()


def test_decode_gives_frames(engine: Engine, plain: Result) -> None:
    frames = engine.decode(plain.latents)
    assert (frames.shape, frames.dtype) == ((9, 64, 64, 3), np.uint8)
    # A red circle on gray: the corner is gray, and red is somewhere.
    assert np.ptp(frames[0, -8:, :8].reshape(-1, 3).mean(0)) < 40
    assert ((frames[..., 0] > 180) & (frames[..., 1] < 90) & (frames[..., 2] < 90)).sum() > 9 * 100


def test_decoding_what_is_not_finite_fails(engine: Engine, plain: Result) -> None:
    with pytest.raises(NotFinite):
        engine.decode(plain.latents * float("nan"))
    with pytest.raises(ConstantOutput):
        # White everywhere, far beyond the range.
        engine.decode(LinearCodec(WEIGHTS / "codec.safetensors", "cpu").encode(torch.full((3, 9, 64, 64), 9.0)))


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(WeightsError, match="wan-99b"):
        Engine.load("wan-99b")


def some_regions() -> Regions:
    base = torch.zeros(3, 8, 8, dtype=torch.bool)
    base[:, 3, 3] = True
    regions = build(base, RegionSettings())
    assert isinstance(regions, Regions)
    return regions


def all_stages(plain: Result, **changes: Any) -> Reuse:
    """A hit with every part of it: stage 2 from step 1 to 3, two amplified tokens."""
    whole = {
        "k2": 3,
        "regions": some_regions(),
        "tokens": (2, 3),
        "gains": Gains(key=2.0, output=1.2, until=1.0, tau=0.5),
    }
    return reuse_of(plain, 1, **(whole | changes))


@pytest.mark.parametrize("scale", [2.5, 1.0])
def test_the_trace_of_all_stages_counts_what_the_blocks_saw(
    engine: Engine, plain: Result, request_of: Make, settings: GenerationSettings, scale: float
) -> None:
    """Law 7."""
    request = request_of("a green circle moves left", settings=replace(settings, guidance_scale=scale))
    reuse = all_stages(plain)
    with counting(engine) as seen:
        trace = engine.generate(request, reuse).trace
    passes, config, slots = 2 if scale > 1 else 1, engine.model.transformer.config, engine.model.text_slots
    assert seen == [75] * (2 * passes) + [192] * passes
    assert (trace.forward_passes, trace.tokens_computed) == (len(seen), sum(seen))
    assert trace.tokens_total == passes * 4 * 192
    text = passes * text_flops(config, slots)
    assert trace.flops_computed == text + sum(forward_flops(config, tokens, slots) for tokens in seen)
    assert trace.visible == (75 / 192, 75 / 192, 1.0)
    assert (trace.k1, trace.k2, trace.steps_skipped, trace.steps_computed) == (1, 3, 1, 3)
    assert trace.regions == some_regions().digest
    assert trace.tokens == (2, 3)
    assert trace.gains == tuple(reuse.gains.at(k, k1=1, steps=4, m=0.9) for k in (1, 2, 3))
    assert trace.details()["gains"][0] == pytest.approx([1.2, 1.04])


def test_gains_of_one_change_no_bit(engine: Engine, plain: Result, request_of: Make) -> None:
    """Law 2, with all stages."""
    request = request_of("a green circle moves left over a gray background")
    off = engine.generate(request, all_stages(plain, tokens=())).latents
    ones = all_stages(plain, gains=Gains(key=1.0, output=1.0, until=1.0, tau=0.5))
    assert torch.equal(engine.generate(request, ones).latents, off)
    assert not torch.equal(engine.generate(request, all_stages(plain)).latents, off)


def test_stage_2_needs_its_region_and_every_step(engine: Engine, plain: Result, request_of: Make) -> None:
    request = request_of("a green circle moves left over a gray background")
    with pytest.raises(RegionError, match="steps 1 to 3"):
        engine.generate(request, all_stages(plain, regions=None))
    for missing in (1, 2, 3):
        latents = {k: x for k, x in plain.trajectory.items() if k != missing}
        with pytest.raises(MissingStep, match=f"step {missing}"):
            engine.generate(request, all_stages(plain, latents=latents))
    one = torch.ones(3, 8, 7, dtype=torch.bool)
    with pytest.raises(RegionError, match="token grid"):
        engine.generate(request, all_stages(plain, regions=Regions(one, one, one)))


@pytest.mark.parametrize("stop", [0, 2, 3])
@pytest.mark.parametrize("hit", [False, True])
def test_a_stopped_generation_goes_on_bit_for_bit(
    engine: Engine, plain: Result, request_of: Make, hit: bool, stop: int
) -> None:
    request = request_of("a green circle moves left over a gray background")
    reuse = all_stages(plain) if hit else None
    whole = engine.generate(request, reuse, keep=EVERY, evidence=True)
    step = [1 if hit else 0]
    stop = max(stop, step[0])
    with pytest.raises(Stopped) as stopped:
        engine.generate(request, reuse, keep=EVERY, evidence=True, should_stop=lambda: step[0] == stop,
                        on_step=lambda done, steps: step.__setitem__(0, done))  # fmt: skip
    assert stopped.value.checkpoint is not None
    resume = checkpoint.unpack(checkpoint.pack(stopped.value.checkpoint))
    with counting(engine) as seen:
        again = engine.generate(request, reuse, keep=EVERY, evidence=True, resume=resume)
    assert torch.equal(again.latents, whole.latents)
    assert all(torch.equal(again.trajectory[k], whole.trajectory[k]) for k in whole.trajectory)
    assert len(seen) == 2 * (4 - stop)
    assert again.trace.forward_passes == whole.trace.forward_passes
    assert (again.evidence is None) == hit
    if again.evidence is not None and whole.evidence is not None:
        assert torch.equal(again.evidence.maps, whole.evidence.maps)


def test_a_checkpoint_is_good_for_no_other_generation(engine: Engine, plain: Result, request_of: Make) -> None:
    request = request_of("a green circle moves left over a gray background")
    with pytest.raises(Stopped) as stopped:
        engine.generate(request, all_stages(plain), should_stop=lambda: True)
    resume = stopped.value.checkpoint
    others: list[tuple[Request, Reuse | None]] = [
        (replace(request, seed=2), all_stages(plain)),
        (replace(request, prompt="a green ring"), all_stages(plain)),
        (request, all_stages(plain, entry_id=42)),
        (request, all_stages(plain, tokens=(2,))),
        (request, all_stages(plain, k2=2)),
        (request, None),
    ]
    for other, reuse in others:
        with counting(engine) as seen, pytest.raises(CheckpointMismatch):
            engine.generate(other, reuse, resume=resume)
        assert seen == []
    damaged = bytearray(checkpoint.pack(resume))
    damaged[-7] ^= 1
    for data in (bytes(damaged), b"", checkpoint.pack(resume)[:-40], pack({}, {})):
        with pytest.raises(CorruptLatents):
            checkpoint.unpack(data)


def test_evidence_finds_the_object(engine: Engine) -> None:
    """Where the words of a circle were drawn is where the video shows it; what differs is its colour."""
    settings = GenerationSettings(128, 128, 9, 8, 20, 2.0, 5.0)
    request = Request("a red circle stays still over a black background", 3, settings, "domain")
    source = engine.generate(request, evidence=True)
    assert source.evidence is not None
    assert [request.prompt[a:b] for a, b in source.evidence.spans] == [
        "red", "circle", "stays", "black", "background",
    ]  # fmt: skip
    difference = LexicalDiffer().compare(request.prompt, "a blue circle stays still over a black background")
    base = EvidenceSegmenter().region(Source(request.prompt, source.evidence), difference)
    assert base is not None
    pixels = torch.from_numpy(engine.decode(source.latents).astype(np.float32)).amax(-1) > 100
    frames = torch.cat([pixels[:1], pixels[1:].reshape(2, 4, 128, 128).amax(1)])
    shown = frames.reshape(3, 16, 8, 16, 8).float().mean((2, 4)) > 0.5
    assert 36 <= int(shown.sum()) < 384
    assert int((base & shown).sum()) / int((base | shown).sum()) > 0.5


def test_a_policy_decides_as_its_tables_say(engine: Engine) -> None:
    """All of a decision, on a real source: kind, boundaries, region, tokens; and what is missing is told."""
    settings = GenerationSettings(64, 64, 9, 8, 20, 2.5, 3.0)
    request = Request("a red circle stays still over a black background", 3, settings, "domain")
    boundaries = Boundaries.parse({20: [[0.7, 6, 6]]}, 3.0, {"attribute": {20: [[0.8, 10, 13]]}, "motion": {20: []}})

    def policy(name: Policy) -> ReusePolicy:
        gains = Gains(key=2.0, output=1.0, until=1.0, tau=0.7)
        return ReusePolicy(
            name, boundaries, gains, RegionSettings(largest_share=0.95), LexicalDiffer(), EvidenceSegmenter()
        )

    chorus = policy(Policy.chorus)
    assert chorus.kept_steps(settings) == {6, 10, 11, 12, 13}
    assert policy(Policy.nirvana).kept_steps(settings) == {6}
    assert policy(Policy.none).kept_steps(settings) == frozenset()
    source = engine.generate(request, keep=chorus.kept_steps(settings), evidence=True)
    candidate = Candidate(7, 0.9, Source(request.prompt, source.evidence), source.trajectory)

    def decide(name: Policy, prompt: str, candidate: Candidate = candidate) -> Any:
        return policy(name).decide(prompt, engine.model.token_offsets(prompt), settings, "domain", candidate)

    blue = "a blue circle stays still over a black background"
    reuse = decide(Policy.chorus, blue).reuse
    assert (reuse.k1, reuse.k2, reuse.tokens, reuse.entry_id) == (10, 13, (2,), 7)
    assert reuse.difference.kind == "attribute"
    assert 0 < reuse.regions.share <= 0.95
    hit = engine.generate(Request(blue, 4, settings, "domain"), reuse)
    assert hit.trace.tokens_computed < 2 * 10 * 192
    nirvana = decide(Policy.nirvana, blue).reuse
    assert (nirvana.k1, nirvana.k2, nirvana.tokens, nirvana.regions) == (6, 6, (), None)
    assert nirvana.difference.kind == "attribute"  # for the record alone
    assert decide(Policy.none, blue).reuse is None
    both = decide(Policy.chorus, "a blue square stays still over a black background").reuse
    # Of attribute and object, what both bear: the latter has the general table.
    assert (both.difference.kind, both.k1, both.k2) == ("several", 6, 6)
    moving = decide(Policy.chorus, "a red circle moves left over a black background")
    assert moving.reuse is None
    assert "motion" in moving.notes[0]
    lacking = replace(candidate, latents={k: x for k, x in source.trajectory.items() if k != 12})
    cut = decide(Policy.chorus, blue, lacking)
    assert (cut.reuse.k1, cut.reuse.k2) == (10, 10)
    assert "lacks steps [12]" in cut.notes[0]
    depths = [policy(name).depth(request.prompt, blue, 0.9, settings) for name in (Policy.chorus, Policy.nirvana)]
    assert depths == [(10, 13), (6, 6)]
    assert policy(Policy.none).depth(request.prompt, blue, 0.9, settings) == (0, 0)
    blind = replace(candidate, source=Source(request.prompt, None))
    assert (decide(Policy.chorus, blue, blind).reuse.k2, decide(Policy.chorus, blue, blind).notes) == (
        10, ("no stage 2: no region",),
    )  # fmt: skip


def test_of_several_kinds_the_amplified_ones_have_their_words_amplified() -> None:
    boundaries = Boundaries.parse({20: [[0.7, 6, 6]]}, 3.0, {"object": {20: [[0.8, 12, 12]]}, "motion": {20: []}})
    off, strong = (Gains(key=key, output=1.0, until=1.0, tau=0.7) for key in (1.0, 2.0))
    policy = ReusePolicy(
        Policy.chorus, boundaries, off, RegionSettings(), LexicalDiffer(), EvidenceSegmenter(), {"object": strong}
    )
    source = Candidate(7, 0.9, Source("a red circle stays still over a black background", None), {})

    def decide(prompt: str) -> Reuse | None:
        words = [(m.start(), m.end()) for m in re.finditer(r"\w+", prompt)]  # a token for each word
        return policy.decide(prompt, words, GenerationSettings(64, 64, 9, 8, 20, 2.5, 3.0), "domain", source).reuse

    both = decide("a blue square stays still over a black background")
    assert both is not None
    assert (both.k1, both.tokens, both.gains) == (6, (2,), strong)
    shape = decide("a red square stays still over a black background")
    assert shape is not None
    assert (shape.k1, shape.tokens, shape.gains) == (12, (2,), strong)
    colour = decide("a blue circle stays still over a black background")
    assert colour is not None
    assert (colour.k1, colour.tokens) == (6, (1,))
    assert colour.gains.at(6, k1=6, steps=20, m=0.8) == (1.0, 1.0)
    assert decide("a blue circle grows over a black background") is None  # motion bears nothing here


def test_a_lineage_is_enough_to_run_it_again(engine: Engine, plain: Result, request_of: Make) -> None:
    """Law 10: stored latents, and the plain values of the trace; nothing else of the first run."""
    request = request_of("a green circle moves left over a gray background")
    stored = pack(plain.trajectory, {}, "float16")
    first = engine.generate(request, all_stages(plain, latents=unpack(stored).latents))
    lineage = all_stages(plain).lineage()
    again = Reuse(
        lineage["entry"], "domain", lineage["m"], lineage["k1"], lineage["k2"], unpack(stored).latents,
        some_regions(), tuple(lineage["tokens"]), Gains(**lineage["gains"]),
    )  # fmt: skip
    assert again.regions is not None
    assert lineage["regions"] == again.regions.digest == first.trace.regions
    assert torch.equal(engine.generate(request, again).latents, first.latents)


def test_models_may_be_loaded_by_several_threads_at_once() -> None:
    """The libraries tell torch, for the whole process, to make modules without storage while they load."""
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: Engine.load(), range(12)))
    assert len({engine.fingerprint for engine in loaded}) == 1
