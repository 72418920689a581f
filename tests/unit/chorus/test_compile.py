"""Blocks by torch.compile: the same results, one compilation for all blocks and all regions of a size, each counted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from chorus_batch.chorus import block
from chorus_batch.chorus.block import CompiledBlock
from chorus_batch.chorus.config import GenerationSettings
from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.errors import UnsupportedSettings
from chorus_batch.chorus.gains import Gains
from chorus_batch.chorus.network import Network
from chorus_batch.chorus.regions import Regions, RegionSettings, build, widen
from chorus_batch.chorus.request import Request, Result, Reuse

Make = Callable[..., Request]
EVERY = frozenset(range(5))


class Seen(CompiledBlock):
    """Notes the tokens that went in."""

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self.tokens: list[int] = []

    def __call__(self, block: Any, hidden: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.tokens.append(hidden.shape[1])
        return super().__call__(block, hidden, *rest)


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Result:
    settings = GenerationSettings(64, 64, 9, 8, 4, 2.5, 3.0)
    return engine.generate(Request("a red circle moves left over a gray background", 1, settings, "domain"), keep=EVERY)


@pytest.fixture
def compiling(engine: Engine) -> Iterator[Callable[[str], Seen]]:
    """Gives the engine's network compiled blocks until the test ends."""

    def compiling(backend: str) -> Seen:
        engine.network.compiled = seen = Seen(backend)
        return seen

    yield compiling
    engine.network.compiled = None


def around(place: int) -> Regions:
    base = torch.zeros(3, 8, 8, dtype=torch.bool)
    base[:, place, 3] = True
    regions = build(base, RegionSettings())
    assert isinstance(regions, Regions)
    return regions


def hit(plain: Result, regions: Regions) -> Reuse:
    gains = Gains(key=2.0, output=1.2, until=1.0, tau=0.5)
    return Reuse(41, "domain", 0.9, 1, 3, plain.trajectory, regions, (2, 3), gains)


def test_compiled_blocks_compute_the_same_and_are_counted(
    engine: Engine, plain: Result, request_of: Make, compiling: Callable[[str], Seen]
) -> None:
    """A miss and two hits, uncompiled and compiled. Only traced, not compiled: that takes a minute."""
    request = request_of("a green circle moves left")
    first, second = around(2), around(1)
    assert int(first.see.sum()) != int(second.see.sum())  # 75 and 60 tokens, of which 84 and 60 are made
    sizes = [int(widen(regions).see.sum()) for regions in (first, second)]
    assert sizes == [84, 60]
    third = around(4)
    reuses = [None, hit(plain, first), hit(plain, third)]
    expected = []
    for reuse in reuses:
        wide = reuse and replace(reuse, regions=widen(reuse.regions or first))
        expected.append(engine.generate(request, wide, keep=EVERY, evidence=True))
    compiled = compiling("eager")
    for reuse, uncompiled, count in zip(reuses, expected, (1, 1, 0), strict=True):
        compiled.tokens.clear()
        result = engine.generate(request, reuse, keep=EVERY, evidence=True)
        trace = result.trace
        assert trace.compilations == trace.details()["compilations"] == count
        assert trace.backend["compiler"] == "eager"
        assert (result.latents - uncompiled.latents).abs().max() <= 1e-4
        assert (trace.regions, trace.visible) == (uncompiled.trace.regions, uncompiled.trace.visible)
        # What was computed is what the trace counts: law 7.
        blocks = len(engine.model.transformer.blocks)
        assert sum(compiled.tokens) == trace.tokens_computed * blocks == uncompiled.trace.tokens_computed * blocks
        assert len(compiled.tokens) == trace.forward_passes * blocks
        if reuse is None:
            assert result.evidence is not None and uncompiled.evidence is not None
            assert (result.evidence.maps.int() - uncompiled.evidence.maps.int()).abs().max() <= 1
        else:
            # Law 5, with the region that was asked for: what is seen grew, what is written didn't.
            assert reuse.regions is not None
            outside = ~reuse.regions.edit.repeat_interleave(2, 1).repeat_interleave(2, 2)
            assert torch.equal(result.trajectory[3][:, outside], plain.trajectory[3][:, outside])
    assert compiled.compilations == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch's own, where inductor is imported
def test_inductors_blocks_compute_the_same(engine: Engine) -> None:
    latents = torch.randn(1, 16, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    network = engine.network
    with torch.inference_mode():
        features = engine.model.encode("a green circle moves left")
        text, times, visible = network.text(features), network.times(torch.tensor([500.0])), network.visible(latents)
        expected = network.velocity(latents, times, text, visible)
        try:
            engine.use_compiler()
            compiled = network.velocity(latents, times, text, visible)
            assert network.compiled is not None and network.compiled.compilations == 2  # one to try it out
        finally:
            network.compiled = None
    assert (compiled - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("seed", range(4))
def test_a_widened_region_has_few_sizes_and_the_nearest_tokens(seed: int) -> None:
    base = torch.rand(5, 6, 7, generator=torch.Generator().manual_seed(seed)) < 0.02 * (seed + 1)
    base[0, 0, 0] = True
    see = base if seed % 2 else torch.zeros_like(base).index_fill(0, torch.tensor([2]), True)
    regions = Regions(see & base, see & base, see)
    wide = widen(regions)
    count = int(wide.see.sum())
    assert count % 14 == 0 and 0 <= count - int(see.sum()) < 14  # 210 tokens: 14 are a sixteenth, rounded up
    assert torch.equal(wide.edit, regions.edit) and torch.equal(wide.base, regions.base)
    assert not bool((see & ~wide.see).any())
    if seed % 2 == 0:  # a whole frame: the next ones lie beside it
        assert wide.see[2].all() and not wide.see[[0, 4]].any()
    assert widen(wide).digest == wide.digest == widen(regions).digest


def test_a_region_that_becomes_everything_isnt_gathered(random_transformer: Any) -> None:
    latents, see = torch.zeros(1, 16, 3, 8, 12), torch.ones(3, 4, 6, dtype=torch.bool)
    see[0, 0, 0] = False
    everything = widen(Regions(see, see, see)).see
    assert everything.all()
    network = Network(random_transformer)
    assert network.visible(latents, everything).places is not None
    network.compiled = CompiledBlock("eager")
    assert network.visible(latents, everything).places is None
    assert network.visible(latents, see).places is not None


def test_too_many_shapes_run_uncompiled(
    engine: Engine, plain: Result, request_of: Make, compiling: Callable[[str], Seen], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(block, "MOST", 1)
    compiled = compiling("eager")
    for _ in range(2):
        trace = engine.generate(request_of("a green circle moves left"), hit(plain, around(2))).trace
    assert set(compiled.tokens) == {84} and compiled.compilations == 1
    assert trace.visible == (84 / 192, 84 / 192, 1.0)
    assert len([each for each in caplog.messages if "run uncompiled" in each]) == 1


def test_what_cant_compile_is_refused(engine: Engine) -> None:
    try:
        with pytest.raises(UnsupportedSettings, match=r"torch.compile can't run here: .*nonsense") as refused:
            engine.use_compiler("nonsense")
    finally:
        engine.network.compiled = None
    assert "CHORUS_COMPILE" in refused.value.hint


WITHOUT = """
import os
os.environ.update(PATH="/nowhere", CXX="/nowhere/g++", TORCHINDUCTOR_CACHE_DIR={folder!r})
from chorus_batch.chorus.config import GenerationSettings
from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.errors import UnsupportedSettings
try:
    Engine.load().use_compiler()
except UnsupportedSettings as error:
    assert "No working C++ compiler" in str(error), error
    assert "g++" in error.hint
else:
    raise AssertionError("compiled")
"""


@pytest.mark.slow
def test_without_a_compiler_it_says_so(tmp_path: Any) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT.format(folder=str(tmp_path))], check=True)
