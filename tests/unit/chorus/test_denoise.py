"""Law 1: with the cache off the loop gives what diffusers' WanPipeline gives, bit for bit, on a CPU in float32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from chorus_batch.chorus.denoise import Guidance, denoise
from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.errors import Stopped
from chorus_batch.chorus.request import Request
from chorus_batch.chorus.schedule import make_scheduler

SHAPE = (1, 16, 3, 8, 8)

SCHEDULERS: dict[str, Callable[[], Any]] = {
    "euler": lambda: make_scheduler("euler", 3.0),
    "diffusers' own euler": lambda: FlowMatchEulerDiscreteScheduler(shift=7.0),
    "unipc": lambda: make_scheduler("unipc", 5.0),
}


def by_pipeline(transformer: Any, scheduler: Any, noise: torch.Tensor, guidance: Guidance, steps: int) -> torch.Tensor:
    pipeline = WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, transformer=transformer)
    pipeline.set_progress_bar_config(disable=True)
    latents: torch.Tensor = pipeline(
        prompt_embeds=guidance.conditional,
        negative_prompt_embeds=guidance.unconditional,
        latents=noise,
        height=64,
        width=64,
        num_frames=9,
        num_inference_steps=steps,
        guidance_scale=guidance.scale,
        output_type="latent",
    ).frames
    return latents


def random_inputs(scale: float) -> tuple[torch.Tensor, Guidance]:
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(SHAPE, generator=generator)
    texts = torch.randn(2, 1, 16, 32, generator=generator)
    return noise, Guidance(texts[0], texts[1] if scale > 1 else None, scale)


@pytest.mark.parametrize("scale", [5.0, 1.0])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_random_weights_equal_the_pipeline(random_transformer: Any, name: str, scale: float) -> None:
    noise, guidance = random_inputs(scale)
    expected = by_pipeline(random_transformer, SCHEDULERS[name](), noise, guidance, 6)
    with torch.inference_mode():
        ours = denoise(random_transformer, SCHEDULERS[name](), noise, guidance, 6)
    assert torch.equal(ours.latents, expected)
    assert not torch.equal(ours.latents, noise)


def test_the_builtin_model_equals_the_pipeline(engine: Engine, request_of: Callable[..., Request]) -> None:
    request = request_of(negative_prompt="a blue ring", seed=11)
    noise = torch.randn((1, 16, 3, 16, 16), generator=torch.Generator("cpu").manual_seed(11))
    with torch.no_grad():
        guidance = Guidance(engine.model.encode(request.prompt), engine.model.encode("a blue ring"), 2.5)
    expected = by_pipeline(engine.model.transformer, make_scheduler("euler", 3.0), noise, guidance, 4)
    assert torch.equal(engine.generate(request).latents, expected[0])


@pytest.mark.parametrize("start", range(7))
def test_starting_from_its_own_latents_changes_nothing(random_transformer: Any, start: int) -> None:
    """Law 4 on random weights, for every step."""
    noise, guidance = random_inputs(5.0)
    everything = frozenset(range(7))
    with torch.inference_mode():
        plain = denoise(random_transformer, make_scheduler("euler", 3.0), noise, guidance, 6, keep=everything)
        again = denoise(
            random_transformer,
            make_scheduler("euler", 3.0),
            plain.kept[start][None],
            guidance,
            6,
            start=start,
            keep=everything,
        )
    assert torch.equal(again.latents, plain.latents)
    assert set(again.kept) == set(range(start, 7))
    assert all(torch.equal(again.kept[k], plain.kept[k]) for k in again.kept)
    assert again.forward_passes == 2 * (6 - start)


def test_a_multistep_solver_starts_again_at_first_order(random_transformer: Any) -> None:
    """From x[k] it can't know its history: the first step is first order, and the result stays near."""
    noise, guidance = random_inputs(5.0)
    with torch.inference_mode():
        plain = denoise(random_transformer, make_scheduler("unipc", 5.0), noise, guidance, 20, keep={10})
        again = denoise(random_transformer, make_scheduler("unipc", 5.0), plain.kept[10][None], guidance, 20, start=10)
    distance = (again.latents - plain.latents).abs().max() / plain.latents.abs().max()
    assert 0 < distance < 0.05


def test_it_stops_before_the_step(random_transformer: Any) -> None:
    noise, guidance = random_inputs(1.0)
    done: list[tuple[int, int]] = []
    with pytest.raises(Stopped) as stopped, torch.inference_mode():
        denoise(
            random_transformer,
            make_scheduler("euler", 3.0),
            noise,
            guidance,
            6,
            should_stop=lambda: len(done) == 2,
            on_step=lambda step, steps: done.append((step, steps)),
        )
    assert done == [(1, 6), (2, 6)]
    assert (stopped.value.step, stopped.value.steps) == (2, 6)
