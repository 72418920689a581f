"""Laws 4, 7 and 8 for stage 1 on the built-in model; determinism; every refusal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from chorus_batch.chorus.config import GenerationSettings
from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.errors import (
    ConstantOutput,
    CorruptLatents,
    DomainMismatch,
    EngineError,
    MissingStep,
    NotFinite,
    Stopped,
    UnsupportedSettings,
    WeightsError,
)
from chorus_batch.chorus.latents import pack, unpack
from chorus_batch.chorus.request import Request, Result, Reuse
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
    stored, _ = unpack(pack(plain.trajectory, {}))
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
    assert trace.flops_total * (4 - k1) == trace.flops_computed * 4
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

    def breaking(module: Any, inputs: Any, output: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls < 7:
            return output
        # From x[3] to exactly zero in one Euler step: v = x / sigma.
        sigma = torch.tensor(0.5, dtype=torch.float32)
        return (inputs[0] / sigma if value == 0.0 else output[0] * value,)

    hook = engine.model.transformer.register_forward_hook(breaking)
    try:
        with pytest.raises(error):
            engine.generate(request_of())
    finally:
        hook.remove()


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
