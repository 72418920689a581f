"""Step caches in this loop against the library's own pipeline, and what the library doesn't know: hits and regions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.hooks.faster_cache import FasterCacheConfig
from diffusers.hooks.first_block_cache import FirstBlockCacheConfig
from diffusers.hooks.mag_cache import MagCacheConfig
from diffusers.hooks.pyramid_attention_broadcast import PyramidAttentionBroadcastConfig
from diffusers.hooks.sea_cache import SeaCacheConfig
from diffusers.hooks.taylorseer_cache import TaylorSeerCacheConfig

from chorus_batch.chorus import stepcache, teacache
from chorus_batch.chorus.attention import Gain
from chorus_batch.chorus.checkpoint import Checkpoint
from chorus_batch.chorus.config import STEP_CACHES, GenerationSettings
from chorus_batch.chorus.cost import Work, forward_flops, work_flops
from chorus_batch.chorus.denoise import Denoised, Guidance, RegionStage, Walk, denoise
from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.errors import CheckpointMismatch, Stopped, UnsupportedSettings
from chorus_batch.chorus.evidence import Recorder, Word
from chorus_batch.chorus.network import Network
from chorus_batch.chorus.regions import Regions
from chorus_batch.chorus.request import Request
from chorus_batch.chorus.schedule import make_scheduler
from chorus_batch.chorus.stepcache import step_cache
from chorus_batch.chorus.teacache import TeaCacheConfig, apply_teacache, remove_teacache
from tests.unit.chorus.pipeline import latents_of, wan_pipeline

STEPS = 20
SHAPE = (1, 16, 3, 8, 8)
TOKENS = 48
BLOCKS = 2
WHOLE = Work.whole(BLOCKS)
CACHES = [name for name in STEP_CACHES if name != "none"]
# These have one state for both branches in the library, which makes one branch answer for the other.
SHARED_BY_BRANCHES = ("pab", "fastercache")
# These leave out parts of blocks, the others whole blocks.
PARTLY = ("taylorseer", "pab", "fastercache")

POLYNOMIAL = (0.0, 0.0, 0.0, 1.0, 0.0)
TEACACHE = TeaCacheConfig(POLYNOMIAL, 0.3)
RATIOS = tuple(1 + 0.01 * (-1) ** k for k in range(STEPS))


@pytest.fixture
def network(random_transformer: Any, monkeypatch: pytest.MonkeyPatch) -> Network:
    """Of random weights, with made-up fits."""
    monkeypatch.setattr(teacache, "FITTED", {"random": TEACACHE})
    monkeypatch.setattr(stepcache, "MAGNITUDES", {"random": RATIOS})
    return Network(random_transformer)


def inputs(scale: float, seed: int = 3) -> tuple[torch.Tensor, Guidance]:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(SHAPE, generator=generator)
    texts = torch.randn(2, 1, 16, 32, generator=generator)
    return noise, Guidance(texts[0], texts[1] if scale > 1 else None, scale)


def run(network: Network, name: str, noise: torch.Tensor, guidance: Guidance, **walk: Any) -> Denoised:
    caching = step_cache(name, network.transformer, "random", STEPS)
    with torch.inference_mode(), caching as cache:
        return denoise(network, euler, noise, Walk(STEPS, guidance, cache=cache, **walk))


def euler() -> Any:
    return make_scheduler("euler", 5.0)


def steps_of(ran: tuple[Work, ...], passes: int, part: str) -> list[int]:
    """The steps in whose first pass a part ran in any block."""
    return [k for k, work in enumerate(ran[::passes]) if getattr(work, part) > 0]


@contextmanager
def library_cache(pipeline: Any, name: str) -> Iterator[None]:
    """The same cache as the library enables it, with its own counting."""
    transformer = pipeline.transformer
    if name == "teacache":
        apply_teacache(transformer, TEACACHE)
        yield
        remove_teacache(transformer)
        return
    configs: dict[str, Callable[[], Any]] = {
        "magcache": lambda: MagCacheConfig(num_inference_steps=STEPS, mag_ratios=list(RATIOS)),
        "taylorseer": lambda: TaylorSeerCacheConfig(
            cache_identifiers=[r"blocks\.\d+\.(attn1|attn2|ffn)"], taylor_factors_dtype=torch.float32
        ),
        "pab": lambda: PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            cross_attention_block_skip_range=6,
            current_timestep_callback=lambda: pipeline.current_timestep,
        ),
        "fastercache": lambda: FasterCacheConfig(
            is_guidance_distilled=True,
            attention_weight_callback=lambda module: 0.5,
            current_timestep_callback=lambda: pipeline.current_timestep,
        ),
        "fbcache": lambda: FirstBlockCacheConfig(threshold=0.05),
        "seacache": SeaCacheConfig,
    }
    transformer.enable_cache(configs[name]())
    yield
    transformer.disable_cache()


@pytest.mark.parametrize(
    ("name", "scale"),
    [(name, scale) for name in CACHES for scale in (1.0, 5.0) if scale == 1.0 or name not in SHARED_BY_BRANCHES],
)
def test_it_equals_the_pipeline_with_the_same_cache(network: Network, name: str, scale: float) -> None:
    noise, guidance = inputs(scale)
    pipeline = wan_pipeline(network.transformer, euler())
    with library_cache(pipeline, name):
        expected = latents_of(pipeline, noise, guidance, STEPS)
    ours = run(network, name, noise, guidance)
    assert torch.equal(ours.latents, expected)
    assert not torch.equal(ours.latents, run(network, "none", noise, guidance).latents)


@pytest.mark.parametrize("name", CACHES)
def test_guidance_branches_are_kept_apart(network: Network, name: str) -> None:
    """What one branch says doesn't depend on the other: at scale 1 the first counts alone, at scale 0 the second."""
    noise, guidance = inputs(5.0)
    assert guidance.unconditional is not None
    first = run(network, name, noise, Guidance(guidance.conditional, None, 1.0))
    same = run(network, name, noise, replace(guidance, unconditional=guidance.conditional))
    assert torch.equal(same.latents, first.latents)
    alone = run(network, name, noise, replace(guidance, scale=1.0))
    assert torch.allclose(alone.latents, first.latents, atol=1e-4)
    second = run(network, name, noise, Guidance(guidance.unconditional, None, 1.0))
    nothing = run(network, name, noise, replace(guidance, scale=0.0))
    assert torch.equal(nothing.latents, second.latents)
    assert not torch.equal(second.latents, first.latents)
    assert same.ran[::2] == same.ran[1::2] == alone.ran[::2] == first.ran
    assert nothing.ran[1::2] == second.ran


@pytest.mark.parametrize("name", CACHES)
def test_what_runs_is_less_and_is_counted(network: Network, name: str) -> None:
    """Law 7: by torch's own hooks on modules that nothing but a running block calls."""
    noise, guidance = inputs(5.0)
    seen: Counter[str] = Counter()
    probes = {
        "blocks": "norm1",
        "self_attention": "attn1.to_q",
        "text_attention": "attn2.to_q",
        "feed_forward": "ffn.net.0",
    }
    handles = [
        block.get_submodule(probe).register_forward_hook(lambda module, args, out, kind=kind: seen.update([kind]))
        for block in network.transformer.blocks
        for kind, probe in probes.items()
    ]
    try:
        done = run(network, name, noise, guidance)
    finally:
        for handle in handles:
            handle.remove()
    assert len(done.ran) == len(done.passes) == 2 * STEPS
    assert done.ran[:2] == (WHOLE, WHOLE)
    assert {kind: sum(getattr(work, kind) for work in done.ran) for kind in probes} == dict(seen)
    everything = 2 * STEPS * BLOCKS
    assert (seen["blocks"] == everything) == (name in PARTLY)
    assert seen["self_attention"] < everything


@pytest.mark.parametrize("name", CACHES)
def test_afterwards_the_transformer_is_as_it_was(network: Network, name: str) -> None:
    noise, guidance = inputs(5.0)
    before = run(network, "none", noise, guidance)
    run(network, name, noise, guidance)
    with pytest.raises(RuntimeError, match="in between"):
        run(network, name, noise, guidance, gain=_failing)
    after = run(network, "none", noise, guidance)
    assert torch.equal(after.latents, before.latents)
    assert after.ran == ()
    assert not network.transformer.is_cache_enabled
    registries = [m._diffusers_hook for m in network.transformer.modules() if hasattr(m, "_diffusers_hook")]
    assert registries
    assert all(not registry.hooks for registry in registries)


def _failing(k: int) -> Gain | None:
    if k == 5:
        raise RuntimeError("in between")
    return None


@pytest.mark.parametrize("name", CACHES)
def test_a_second_request_is_as_if_it_were_alone(network: Network, name: str) -> None:
    """Under one enabled cache: the first request stops halfway with everything still in it, where the second begins."""
    noise, guidance = inputs(5.0)
    other, texts = inputs(5.0, seed=4)
    alone = run(network, name, noise, guidance, start=17)
    with torch.inference_mode(), step_cache(name, network.transformer, "random", STEPS) as cache:
        with pytest.raises(Stopped):
            denoise(network, euler, other, Walk(STEPS, texts, cache=cache), should_stop=_after(17))
        second = denoise(network, euler, noise, Walk(STEPS, guidance, start=17, cache=cache))
    assert torch.equal(second.latents, alone.latents)
    assert second.ran == alone.ran


def _after(steps: int) -> Callable[[], bool]:
    asked: list[None] = []

    def should_stop() -> bool:
        asked.append(None)
        return len(asked) > steps

    return should_stop


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("start", [1, 7, 12, STEPS - 1])
def test_a_hit_begins_with_a_whole_step(network: Network, name: str, start: int) -> None:
    noise, guidance = inputs(5.0)
    done = run(network, name, noise, guidance, start=start)
    assert len(done.ran) == 2 * (STEPS - start)
    assert done.ran[:2] == (WHOLE, WHOLE)
    assert bool(torch.isfinite(done.latents).all())


# At step 12 the steps that a schedule has to begin with are long past: skipping begins as soon as it can.
@pytest.mark.parametrize(
    ("name", "part", "runs"),
    [
        ("magcache", "blocks", [12, 16]),
        ("taylorseer", "feed_forward", [12, 13, 15]),
        # Every second and every sixth step of the schedule, for its times are all below 800; below 681 from step 15 on.
        ("pab", "self_attention", [12, 14, 16, 18]),
        ("pab", "text_attention", [12, 18]),
        ("fastercache", "self_attention", [12, 13, 14, 16, 18]),
    ],
)
def test_a_hit_counts_by_the_schedule(network: Network, name: str, part: str, runs: list[int]) -> None:
    noise, guidance = inputs(5.0)
    done = run(network, name, noise, guidance, start=12)
    assert [12 + k for k in steps_of(done.ran, 2, part)] == runs


@pytest.mark.parametrize("name", CACHES)
def test_nothing_crosses_the_ends_of_the_region_stage(network: Network, name: str) -> None:
    """What follows stage 2 is what would follow from its latents alone."""
    noise, guidance = inputs(5.0)
    source = run(network, "none", *inputs(5.0, seed=4), keep=frozenset(range(STEPS + 1))).kept
    see = torch.zeros(3, 4, 4, dtype=torch.bool)
    see[:, 1:3] = True
    edit = torch.zeros_like(see)
    edit[:, 1:3, 1:3] = True
    region = RegionStage(17, Regions(edit, edit, see), source)
    done = run(network, name, noise, guidance, start=6, region=region, keep=frozenset({17}))
    assert done.passes == (24,) * 22 + (TOKENS,) * 6
    assert done.ran[:2] == done.ran[22:24] == (WHOLE, WHOLE)
    if name != "fbcache":  # here every step's first block differs too much from the one before
        assert sum(work.self_attention for work in done.ran[:22]) < 22 * BLOCKS
    rest = run(network, name, done.kept[17][None], guidance, start=17)
    assert torch.equal(rest.latents, done.latents)
    assert rest.ran == done.ran[22:]


@pytest.mark.parametrize("name", CACHES)
def test_evidence_is_what_ran_and_changes_nothing(network: Network, name: str) -> None:
    noise, guidance = inputs(5.0)
    recorder = Recorder([Word((0, 3), tuple(range(16))), Word((4, 7), (1, 2))], {1}, frozenset(range(STEPS)))
    done = run(network, name, noise, guidance, recorder=recorder)
    assert torch.equal(done.latents, run(network, name, noise, guidance).latents)
    assert recorder.sum is not None
    # All tokens together have all of each of the two heads' attention, so their mean says how often it was recorded.
    recorded = sum(work.text_attention == BLOCKS for work in done.ran[::2])
    assert recorded > 0
    assert torch.allclose(recorder.sum[0], torch.tensor(recorded * 2 / 16))
    assert recorder.evidence((3, 4, 4)) is not None


@pytest.mark.parametrize("name", CACHES)
def test_a_gain_acts(network: Network, name: str) -> None:
    noise, guidance = inputs(5.0)
    amplified = run(network, name, noise, guidance, start=6, gain=lambda k: Gain((1, 2), 2.0, 1.0) if k < 12 else None)
    assert not torch.equal(amplified.latents, run(network, name, noise, guidance, start=6).latents)


def test_there_is_no_checkpoint(network: Network) -> None:
    noise, guidance = inputs(1.0)
    with torch.inference_mode(), step_cache("fbcache", network.transformer, "random", STEPS) as cache:
        walk = Walk(STEPS, guidance, cache=cache)
        with pytest.raises(Stopped) as stopped:
            denoise(network, euler, noise, walk, should_stop=_after(3))
        assert (stopped.value.step, stopped.value.checkpoint) == (3, None)
        with pytest.raises(CheckpointMismatch, match="step cache"):
            denoise(network, euler, noise, walk, resume=Checkpoint("", 3, noise, {}, {}))


@pytest.mark.parametrize("name", ["teacache", "magcache"])
def test_unknown_weights_are_refused(network: Network, name: str) -> None:
    cache = step_cache(name, network.transformer, "0123456789abcdef", STEPS)
    with pytest.raises(UnsupportedSettings, match=f"{name} was never fitted to the weights 0123456789ab") as refused:
        cache.__enter__()
    assert "cachefit" in refused.value.hint


def test_settings_refuse_few_steps_and_unknown_names(settings: GenerationSettings) -> None:
    assert settings.step_cache == "none"
    with pytest.raises(UnsupportedSettings, match="step_cache 'deepcache'"):
        replace(settings, step_cache="deepcache")
    for name in CACHES:
        with pytest.raises(UnsupportedSettings, match=f"{name} gains nothing at 4 steps") as refused:
            replace(settings, step_cache=name)
        assert "step_cache none" in refused.value.hint
        assert replace(settings, steps=10, step_cache=name).step_cache == name


@pytest.mark.parametrize("tokens", [1, 48, 1000])
def test_parts_cost_together_what_a_pass_costs(random_transformer: Any, tokens: int) -> None:
    config = random_transformer.config
    assert work_flops(config, tokens, 16, WHOLE) == forward_flops(config, tokens, 16)
    one = [work_flops(config, tokens, 16, Work(0, *(BLOCKS * (i == j) for i in range(3)))) for j in range(3)]
    assert sum(one) - 2 * work_flops(config, tokens, 16, Work(0, 0, 0, 0)) == forward_flops(config, tokens, 16)


def test_the_engine_counts_and_forgets(engine: Engine, request_of: Callable[..., Request]) -> None:
    plain = request_of(settings=replace(request_of().settings, steps=24))
    cached = replace(plain, settings=replace(plain.settings, step_cache="fbcache"))
    before = engine.generate(plain)
    first, second = engine.generate(cached), engine.generate(cached)
    assert torch.equal(first.latents, second.latents)
    assert torch.equal(engine.generate(plain).latents, before.latents)
    assert not torch.equal(first.latents, before.latents)
    assert before.trace.tokens_computed == before.trace.tokens_total == first.trace.tokens_total
    assert before.trace.flops_computed == before.trace.flops_total == first.trace.flops_total
    # The first block always runs, here one of five.
    assert first.trace.forward_passes == 48
    assert first.trace.tokens_total // 5 < first.trace.tokens_computed < first.trace.tokens_total
    assert first.trace.flops_computed < first.trace.flops_total


@pytest.mark.parametrize("table", [teacache.FITTED, stepcache.MAGNITUDES])
def test_the_shipped_weights_are_fitted(engine: Engine, table: dict[str, Any]) -> None:
    """New weights? `python -m chorus_batch.chorus.cachefit` measures them."""
    assert engine.fingerprint[:12] in table
