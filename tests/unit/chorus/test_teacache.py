"""TeaCache against its authors' rule, written down here once more without hooks, and the fit of its polynomial."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from chorus_batch.chorus import teacache
from chorus_batch.chorus.cachefit import Measured, fit, main, measure
from chorus_batch.chorus.config import GenerationSettings
from chorus_batch.chorus.denoise import Denoised, Guidance, Walk, denoise
from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.network import Network
from chorus_batch.chorus.schedule import make_scheduler
from chorus_batch.chorus.stepcache import step_cache
from chorus_batch.chorus.teacache import WAN, TeaCacheConfig, apply_teacache, config_for, remove_teacache
from tests.unit.chorus.pipeline import latents_of, wan_pipeline

STEPS = 20
# Rises everywhere, with some curvature.
COEFFICIENTS = (3.0, -2.0, 1.0, 0.5, 0.01)


class Stack(torch.nn.Module):
    """All blocks as one, with the authors' rule: calls alternate between the conditional and the unconditional pass."""

    def __init__(self, blocks: Any, threshold: float, retained: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.threshold = threshold
        self.retained = retained
        self.calls = 0
        self.memory: list[Any] = [SimpleNamespace(change=0.0), SimpleNamespace(change=0.0)]
        self.ran: list[bool] = []

    def forward(self, hidden: torch.Tensor, text: torch.Tensor, time: torch.Tensor, rotary: Any) -> torch.Tensor:
        step, memory = self.calls // 2, self.memory[self.calls % 2]
        self.calls += 1
        runs = True
        if step >= self.retained:
            distance = ((time - memory.time).abs().mean() / memory.time.abs().mean()).item()
            memory.change += np.poly1d(COEFFICIENTS)(distance)
            runs = memory.change >= self.threshold
        if runs:
            memory.change = 0.0
        memory.time = time.clone()
        self.ran.append(runs)
        if not runs:
            return hidden + memory.residual
        entry = hidden
        for block in self.blocks:
            hidden = block(hidden, text, time, rotary)
        memory.residual = hidden - entry
        return hidden


def inputs() -> tuple[torch.Tensor, Guidance]:
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn((1, 16, 3, 8, 8), generator=generator)
    texts = torch.randn(2, 1, 16, 32, generator=generator)
    return noise, Guidance(texts[0], texts[1], 5.0)


def by_rule(transformer: Any, threshold: float) -> tuple[torch.Tensor, list[bool]]:
    noise, guidance = inputs()
    stack = Stack(transformer.blocks, threshold, retained=5)
    blocks, transformer.blocks = transformer.blocks, torch.nn.ModuleList([stack])
    try:
        latents = latents_of(wan_pipeline(transformer, euler()), noise, guidance, STEPS)
    finally:
        transformer.blocks = blocks
    return latents, stack.ran


def ours(transformer: Any, threshold: float, monkeypatch: pytest.MonkeyPatch, **walk: Any) -> Denoised:
    monkeypatch.setattr(teacache, "FITTED", {"random": TeaCacheConfig(COEFFICIENTS, threshold)})
    noise, guidance = inputs()
    network = Network(transformer)
    with torch.inference_mode(), step_cache("teacache", transformer, "random", STEPS) as cache:
        return denoise(network, euler, noise, Walk(STEPS, guidance, cache=cache, **walk))


def euler() -> Any:
    return make_scheduler("euler", 5.0)


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.25, 1.0, 100.0])
def test_it_is_the_authors_rule(random_transformer: Any, monkeypatch: pytest.MonkeyPatch, threshold: float) -> None:
    expected, ran = by_rule(random_transformer, threshold)
    done = ours(random_transformer, threshold, monkeypatch)
    assert [work.blocks > 0 for work in done.ran] == ran
    assert torch.equal(done.latents, expected)


def test_the_threshold_is_a_scale_from_everything_to_nothing(
    random_transformer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [
        sum(work.blocks > 0 for work in ours(random_transformer, threshold, monkeypatch).ran)
        for threshold in (0.0, 0.1, 0.25, 1.0, 100.0)
    ]
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (2 * STEPS, 2 * 5)
    noise, guidance = inputs()
    with torch.inference_mode():
        plain = denoise(Network(random_transformer), euler, noise, Walk(STEPS, guidance))
    assert torch.equal(ours(random_transformer, 0.0, monkeypatch).latents, plain.latents)


def test_a_hit_retains_by_the_schedule(random_transformer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first five steps of the schedule, not of the request; and one that fills the empty memory."""
    for start, whole in ((0, 5), (3, 2), (4, 1), (5, 1), (12, 1)):
        ran = ours(random_transformer, 100.0, monkeypatch, start=start).ran
        assert [work.blocks > 0 for work in ran[::2]] == [True] * whole + [False] * (STEPS - start - whole)


def test_it_needs_the_step_in_its_context(random_transformer: Any) -> None:
    apply_teacache(random_transformer, TeaCacheConfig(COEFFICIENTS, 0.1))
    noise, guidance = inputs()
    try:
        with random_transformer.cache_context("cond"), pytest.raises(ValueError, match="step_index"):
            random_transformer(noise, torch.tensor([500.0]), guidance.conditional)
    finally:
        remove_teacache(random_transformer)


@pytest.mark.parametrize("name", WAN)
def test_the_published_polynomials_say_something(name: tuple[int, int]) -> None:
    """They are taken as they are over what 50 steps meet."""
    config, polynomial = WAN[name], np.poly1d(WAN[name].coefficients)
    distances = np.linspace(0.0, 0.05, 51)
    estimates = [config.estimate(float(distance)) for distance in distances]
    assert np.allclose(estimates, np.maximum(0.0, polynomial(distances)), atol=1e-12)
    # Far beyond, their fourth power would bring them below zero, and no step would ever run again.
    assert polynomial(0.5) < 0
    assert config.estimate(0.5) == float("inf")


@pytest.mark.parametrize(
    ("coefficients", "distance", "estimate"),
    [
        ((1.0, 0.0), 3.0, 3.0),
        ((0.0, 0.0, 2.0, 1.0), 4.0, 9.0),
        ((0.25,), 7.0, 0.25),
        ((1.0, -1.0), 0.5, 0.0),  # a change isn't negative
        ((-1.0, 2.0, 0.0), 0.5, 0.75),
        ((-1.0, 2.0, 0.0), 1.5, float("inf")),  # its peak is at 1
        ((-1.0, 5.0), 0.0, float("inf")),  # it only falls
    ],
)
def test_estimates(coefficients: tuple[float, ...], distance: float, estimate: float) -> None:
    assert TeaCacheConfig(coefficients, 0.1).estimate(distance) == estimate


def test_coefficients_go_by_the_weights_then_by_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = TeaCacheConfig(COEFFICIENTS, 0.1)
    monkeypatch.setattr(teacache, "FITTED", {"0123456789ab": mine})
    small, large = (SimpleNamespace(num_layers=n, num_attention_heads=h) for n, h in ((30, 12), (40, 40)))
    assert config_for(small, "0123456789abcdef") is mine
    assert config_for(small, "fedcba") is WAN[30, 12]
    assert config_for(large, "fedcba") is WAN[40, 40]
    assert config_for(SimpleNamespace(num_layers=5, num_attention_heads=4), "fedcba") is None


def test_the_fit_finds_the_polynomial_again() -> None:
    measured = []
    for most in (0.2, 0.5):
        distances = np.linspace(0.01, most, 19)
        measured.append(Measured(distances, np.polyval(COEFFICIENTS, np.array([distances, distances])), np.ones(20)))
    assert np.allclose(fit(measured), COEFFICIENTS, atol=1e-8)


def test_a_measured_generation(engine: Engine, settings: GenerationSettings) -> None:
    ten = replace(settings, steps=10)
    one, two = (measure(engine, prompt, ten) for prompt in ("a red circle", "a blue square"))
    assert one.distances.shape == (9,)
    assert one.changes.shape == (2, 9)
    assert one.magnitudes.shape == (10,)
    # The signal is the time's alone; what it has to foretell isn't.
    assert np.array_equal(one.distances, two.distances)
    assert not np.array_equal(one.changes, two.changes)
    assert (one.distances > 0).all()
    assert (one.changes > 0).all()
    assert one.magnitudes[0] == 1.0
    assert not engine.model.transformer.is_cache_enabled


def test_the_command_prints_what_belongs_in_the_tables(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--steps", "10", "--prompt", "a red circle", "--guidance", "1"])
    printed = capsys.readouterr().out
    assert engine.fingerprint[:12] in printed
    lines = dict(line.split(" ", 1) for line in printed.splitlines())
    assert len(lines["polynomial"].split(",")) == 5
    assert len(lines["magnitudes"].split(",")) == 10
