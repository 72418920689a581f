"""Laws 1, 3, 4 and 5 for the loop, on random weights and on the built-in model; stopping and going on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from chorus_batch.chorus import checkpoint
from chorus_batch.chorus.attention import Gain
from chorus_batch.chorus.denoise import Denoised, Guidance, RegionStage, Walk, denoise
from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.errors import Stopped
from chorus_batch.chorus.evidence import Recorder, Word
from chorus_batch.chorus.network import Network
from chorus_batch.chorus.regions import Regions, RegionSettings, build
from chorus_batch.chorus.request import Request
from chorus_batch.chorus.schedule import make_scheduler
from tests.unit.chorus.pipeline import latents_of, wan_pipeline

SHAPE = (1, 16, 3, 8, 8)

SCHEDULERS: dict[str, Callable[[], Any]] = {
    "euler": lambda: make_scheduler("euler", 3.0),
    "diffusers' own euler": lambda: FlowMatchEulerDiscreteScheduler(shift=7.0),
    "unipc": lambda: make_scheduler("unipc", 5.0),
    "dpm++": lambda: make_scheduler("dpm++", 5.0),
}


def random_inputs(scale: float) -> tuple[torch.Tensor, Guidance]:
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(SHAPE, generator=generator)
    texts = torch.randn(2, 1, 16, 32, generator=generator)
    return noise, Guidance(texts[0], texts[1] if scale > 1 else None, scale)


def own_processors(transformer: Any) -> Any:
    """The same weights in a transformer of diffusers as it comes: nothing of this project in it."""
    fresh = type(transformer).from_config(transformer.config).eval()
    fresh.load_state_dict(transformer.state_dict())
    return fresh


def walked(
    transformer: Any, scheduler: str, noise: torch.Tensor, guidance: Guidance, steps: int, **how: Any
) -> Denoised:
    hooks = {name: how.pop(name) for name in ("resume", "should_stop", "on_step") if name in how}
    with torch.inference_mode():
        walk = Walk(steps, guidance, **how)
        return denoise(Network(transformer), SCHEDULERS[scheduler], noise, walk, **hooks)


def some_regions(seed: int = 4, grid: tuple[int, int, int] = (3, 4, 4)) -> Regions:
    base = torch.rand(grid, generator=torch.Generator().manual_seed(seed)) < 0.08
    regions = build(base, RegionSettings(0, 0, 1, 0, 1.0))
    assert isinstance(regions, Regions)
    assert 0 < int(regions.edit.sum()) < int(regions.see.sum()) < regions.see.numel()
    return regions


def on_latents(mask: torch.Tensor) -> torch.Tensor:
    return mask.repeat_interleave(2, 1).repeat_interleave(2, 2)


@pytest.mark.parametrize("scale", [5.0, 1.0])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_random_weights_equal_the_pipeline(random_transformer: Any, name: str, scale: float) -> None:
    """Law 1."""
    noise, guidance = random_inputs(scale)
    expected = latents_of(wan_pipeline(own_processors(random_transformer), SCHEDULERS[name]()), noise, guidance, 6)
    ours = walked(random_transformer, name, noise, guidance, 6)
    assert torch.equal(ours.latents, expected)
    assert not torch.equal(ours.latents, noise)


def test_the_builtin_model_equals_the_pipeline(engine: Engine, request_of: Callable[..., Request]) -> None:
    """Law 1."""
    request = request_of(negative_prompt="a blue ring", seed=11)
    noise = torch.randn((1, 16, 3, 16, 16), generator=torch.Generator("cpu").manual_seed(11))
    with torch.no_grad():
        guidance = Guidance(engine.model.encode(request.prompt), engine.model.encode("a blue ring"), 2.5)
    theirs = own_processors(engine.model.transformer)
    expected = latents_of(wan_pipeline(theirs, make_scheduler("euler", 3.0)), noise, guidance, 4)
    assert torch.equal(engine.generate(request).latents, expected[0])


@pytest.mark.parametrize("start", range(7))
def test_starting_from_its_own_latents_changes_nothing(random_transformer: Any, start: int) -> None:
    """Law 4 on random weights, for every step."""
    noise, guidance = random_inputs(5.0)
    everything = frozenset(range(7))
    plain = walked(random_transformer, "euler", noise, guidance, 6, keep=everything)
    again = walked(random_transformer, "euler", plain.kept[start][None], guidance, 6, start=start, keep=everything)
    assert torch.equal(again.latents, plain.latents)
    assert set(again.kept) == set(range(start, 7))
    assert all(torch.equal(again.kept[k], plain.kept[k]) for k in again.kept)
    assert again.passes == (48,) * (2 * (6 - start))


def test_a_multistep_solver_starts_again_at_first_order(random_transformer: Any) -> None:
    """From x[k] it can't know its history: the first step is first order, and the result stays near."""
    noise, guidance = random_inputs(5.0)
    plain = walked(random_transformer, "unipc", noise, guidance, 20, keep={10})
    again = walked(random_transformer, "unipc", plain.kept[10][None], guidance, 20, start=10)
    distance = (again.latents - plain.latents).abs().max() / plain.latents.abs().max()
    assert 0 < distance < 0.05


@pytest.mark.parametrize("scale", [5.0, 1.0])
@pytest.mark.parametrize("name", ["euler", "unipc"])
def test_outside_the_region_stage_2_leaves_the_source(random_transformer: Any, name: str, scale: float) -> None:
    """Law 5, at the end of stage 2 and at every step of it; law 7 for the passes."""
    noise, guidance = random_inputs(scale)
    other = Guidance(guidance.conditional.flip(1), guidance.unconditional, scale)
    source = walked(random_transformer, name, noise, guidance, 6, keep=frozenset(range(7))).kept
    regions = some_regions()
    hit = walked(random_transformer, name, source[1][None], other, 6, start=1,
                 region=RegionStage(4, regions, source), keep=frozenset(range(7)))  # fmt: skip
    outside = ~on_latents(regions.edit)
    for k in (2, 3, 4):
        assert torch.equal(hit.kept[k][:, outside], source[k][:, outside])
        assert not torch.equal(hit.kept[k], source[k])
    assert not torch.equal(hit.kept[5][:, outside], source[5][:, outside])
    per_step = 2 if scale > 1 else 1
    seen = int(regions.see.sum())
    assert hit.passes == (seen,) * (3 * per_step) + (48,) * (2 * per_step)


@pytest.mark.parametrize("name", ["euler", "unipc"])
def test_a_region_of_everything_is_a_plain_step(random_transformer: Any, name: str) -> None:
    """Law 3: M_see and M_edit everywhere."""
    noise, guidance = random_inputs(5.0)
    everywhere = torch.ones(3, 4, 4, dtype=torch.bool)
    regions = Regions(everywhere, everywhere, everywhere)
    source = {k: torch.full((16, 3, 8, 8), float("nan")) for k in range(7)}
    one = walked(random_transformer, name, noise, guidance, 6, keep={1}, region=RegionStage(1, regions, source))
    plain = walked(random_transformer, name, noise, guidance, 6, keep={1})
    assert (one.kept[1] - plain.kept[1]).abs().max() <= 1e-5
    if name == "euler":
        all_six = walked(random_transformer, name, noise, guidance, 6, region=RegionStage(6, regions, source))
        assert (all_six.latents - plain.latents).abs().max() <= 1e-4


def test_a_solver_forgets_what_it_saw_of_a_region(random_transformer: Any) -> None:
    """Where stage 2 ends a multistep solver starts again: as if the rest were a run of its own."""
    noise, guidance = random_inputs(5.0)
    source = walked(random_transformer, "unipc", noise, guidance, 8, keep=frozenset(range(9))).kept
    region = RegionStage(5, some_regions(), source)
    hit = walked(random_transformer, "unipc", source[2][None], guidance, 8, start=2, region=region, keep={5})
    rest = walked(random_transformer, "unipc", hit.kept[5][None], guidance, 8, start=5)
    assert torch.equal(hit.latents, rest.latents)


def test_only_the_conditional_pass_is_amplified(random_transformer: Any) -> None:
    noise, guidance = random_inputs(5.0)
    asked: list[int] = []

    def gain(k: int) -> Gain | None:
        asked.append(k)
        return Gain((1, 2), 3.0, 1.0) if k == 1 else None

    plain = walked(random_transformer, "euler", noise, guidance, 3, keep=frozenset(range(4)))
    amplified = walked(random_transformer, "euler", noise, guidance, 3, gain=gain, keep=frozenset(range(4)))
    assert asked == [0, 1, 2]
    assert torch.equal(amplified.kept[1], plain.kept[1])
    assert not torch.equal(amplified.kept[2], plain.kept[2])
    # Without guidance's second pass at scale 0 nothing of the first remains, so neither does the gain.
    silent = Guidance(guidance.conditional, guidance.unconditional, 0.0)
    without = walked(random_transformer, "euler", noise, silent, 3)
    assert torch.equal(walked(random_transformer, "euler", noise, silent, 3, gain=gain).latents, without.latents)


def test_it_stops_before_the_step(random_transformer: Any) -> None:
    noise, guidance = random_inputs(1.0)
    done: list[tuple[int, int]] = []
    with pytest.raises(Stopped) as stopped:
        walked(random_transformer, "euler", noise, guidance, 6, should_stop=lambda: len(done) == 2,
               on_step=lambda step, steps: done.append((step, steps)))  # fmt: skip
    assert done == [(1, 6), (2, 6)]
    assert (stopped.value.step, stopped.value.steps) == (2, 6)


@pytest.mark.parametrize("stops", [(0,), (3,), (5,), (6,), (2, 3, 7)])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_stopped_walk_goes_on_bit_for_bit(random_transformer: Any, name: str, stops: tuple[int, ...]) -> None:
    """Through stored bytes; before, inside and after stage 2, with a solver that remembers, several times over."""
    noise, guidance = random_inputs(5.0)
    source = walked(random_transformer, name, noise, guidance, 8, keep=frozenset(range(9))).kept
    words = [Word((0, 3), (1, 2)), Word((4, 9), (3,))]

    def run(**hooks: Any) -> tuple[Denoised, Recorder]:
        recorder = Recorder(words, frozenset({0, 1}), frozenset({5, 6}))
        result = walked(random_transformer, name, noise, guidance, 8, keep={2, 5, 8}, recorder=recorder,
                        region=RegionStage(5, some_regions(), source), identity="walk", **hooks)  # fmt: skip
        return result, recorder

    whole, recorded = run()
    resume = None
    for stop in stops:
        reached = [resume.step if resume is not None else 0]
        with pytest.raises(Stopped) as stopped:
            run(resume=resume, should_stop=lambda stop=stop, reached=reached: reached[0] == stop,
                on_step=lambda done, steps, reached=reached: reached.__setitem__(0, done))  # fmt: skip
        assert stopped.value.checkpoint is not None
        resume = checkpoint.unpack(checkpoint.pack(stopped.value.checkpoint))
        assert (resume.step, resume.identity) == (stop, "walk")
    resumed, again = run(resume=resume)
    assert torch.equal(resumed.latents, whole.latents)
    assert resumed.passes == whole.passes
    assert len(resumed.step_seconds) == 8
    assert set(resumed.kept) == {2, 5, 8}
    assert all(torch.equal(resumed.kept[k], whole.kept[k]) for k in whole.kept)
    first, second = recorded.evidence((3, 4, 4)), again.evidence((3, 4, 4))
    assert first is not None
    assert second is not None
    assert torch.equal(first.maps, second.maps)
