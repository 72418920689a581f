"""Caches between the steps of one generation: what little changes from step to step isn't computed again.

All but TeaCache are diffusers' own, enabled on the transformer for one request. They are made for a loop that runs
every step over all tokens, by the transformer's own `forward`. Here steps may be missing at the beginning and the
tokens may change on the way, so this module tells them the real step before each pass, keeps the guidance branches
apart, and makes them forget where what they hold doesn't fit. What they let run is counted by hooks below theirs.

A cache reuses what an earlier step computed, its amplification of the text's tokens included: where a step's
cross-attention doesn't run, the gain of the last step that ran stays in force, and nothing is added to the evidence.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.hooks.faster_cache import FasterCacheBlockHook, FasterCacheConfig
from diffusers.hooks.first_block_cache import FirstBlockCacheConfig
from diffusers.hooks.hooks import HookRegistry, ModelHook
from diffusers.hooks.mag_cache import MagCacheConfig, MagCacheHeadHook
from diffusers.hooks.pyramid_attention_broadcast import PyramidAttentionBroadcastConfig, PyramidAttentionBroadcastHook
from diffusers.hooks.sea_cache import SeaCacheConfig, SeaCacheRootHook
from diffusers.hooks.taylorseer_cache import TaylorSeerCacheConfig, TaylorSeerCacheHook

from .cost import Work
from .errors import UnsupportedSettings
from .teacache import TeaCacheConfig, apply_teacache, config_for, remove_teacache

# MagCache's ratios, by the first digits of the weights' fingerprint; printed by `cachefit`.
# fmt: off
MAGNITUDES: Mapping[str, tuple[float, ...]] = {
    # The built-in model, 50 steps.
    "a6956cdaead9": (
        1.0, 1.00205, 1.00398, 0.99837, 1.00261, 0.99911, 1.00071, 0.99779, 0.99167, 0.99698,
        0.9945, 0.99148, 0.99389, 0.99524, 0.99202, 0.99473, 0.99088, 0.99132, 0.99148, 0.99593,
        0.99623, 0.98639, 0.99199, 0.99312, 0.98934, 0.99361, 0.98973, 0.98731, 0.98893, 0.98724,
        0.9867, 0.98759, 0.98328, 0.98539, 0.98118, 0.98058, 0.98171, 0.97679, 0.97243, 0.96844,
        0.97084, 0.96539, 0.95932, 0.9501, 0.9435, 0.93274, 0.91555, 0.89557, 0.84699, 0.77937,
    ),
}
# fmt: on

_COUNT = "chorus_count"
_PARTS = {"attn1": "self_attention", "attn2": "text_attention", "ffn": "feed_forward"}


@contextmanager
def step_cache(name: str, transformer: Any, fingerprint: str, steps: int) -> Iterator[StepCache | None]:
    """The cache `name` of config.STEP_CACHES, enabled on a WanTransformer3DModel; None for "none".

    `fingerprint` is the weights', `steps` the whole schedule's number. At the end the transformer is as it was. Raises
    UnsupportedSettings where the cache doesn't know these weights.
    """
    if name == "none":
        yield None
        return
    cache = _CACHES[name](transformer, fingerprint, steps)
    with cache.enabled():
        yield cache


class StepCache:
    """One cache on one transformer, for one request. A subclass says what is particular about its method."""

    hook: type | None = None
    """The class of diffusers' hooks that have to be told something before each pass."""

    def __init__(self, transformer: Any, fingerprint: str, steps: int) -> None:
        if len(transformer.blocks) < 2:
            raise UnsupportedSettings("a step cache needs a transformer of two blocks or more", hint="use none")
        self._transformer = transformer
        self._steps = steps
        self._config = self._configure(fingerprint)
        self._tally = dict.fromkeys(("blocks", *_PARTS.values()), 0)
        self._sigmas: Sequence[float] = ()
        self._times: Sequence[float] = ()
        self._step = 0
        self._first: int | None = None
        self._hooks: list[Any] = []
        self.ran: list[Work] = []

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Hooked into the transformer; afterwards the hooks are gone, and with them what they hold."""
        with self._counting():
            self._apply()
            self._hooks = self._applied() if self.hook is not None else []
            try:
                yield
            finally:
                self._hooks = []
                self._remove()

    def begin(self, sigmas: Sequence[float], times: Sequence[float]) -> None:
        """A request begins: noise levels and timesteps of all steps of its schedule, skipped ones included."""
        self._sigmas, self._times, self.ran = sigmas, times, []
        self.forget()

    def forget(self) -> None:
        """Drop what all earlier steps left: the tokens are others now. The next step runs whole."""
        _registry(self._transformer).reset_stateful_hooks(recurse=True)
        self._first = None

    def at(self, step: int) -> None:
        """The passes that follow are those of this step of the schedule."""
        self._step = step
        if self._first is None:
            self._first = step
            self._restarted(step)

    @contextmanager
    def passing(self, branch: str, latents: torch.Tensor) -> Iterator[None]:
        """Around the blocks of one pass, of a guidance branch; latents [1, C, T, H, W] are what the pass reads."""
        before = dict(self._tally)
        place = {"step_index": self._step, "num_inference_steps": self._steps, "sigma": self._sigmas[self._step]}
        with self._transformer.cache_context(branch, **place):
            self._enter(branch, latents)
            yield
        self.ran.append(Work(**{kind: self._tally[kind] - count for kind, count in before.items()}))

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Around the cache's own hooks, so that these lie below and see only what it lets through."""
        for block in self._transformer.blocks:
            for module, kind in ((block, "blocks"), *((getattr(block, part), kind) for part, kind in _PARTS.items())):
                _registry(module).register_hook(_Count(self._tally, kind), _COUNT)
        try:
            yield
        finally:
            _registry(self._transformer).remove_hook(_COUNT, recurse=True)
            _registry(self._transformer).invalidate_child_registries_cache()

    def _applied(self) -> list[Any]:
        """The hooks of class `hook` on the transformer and below."""
        registries = (getattr(module, "_diffusers_hook", None) for module in self._transformer.modules())
        hooks = (each for registry in registries if registry is not None for each in registry.hooks.values())
        return [each for each in hooks if isinstance(each, self.hook or object)]

    def _configure(self, fingerprint: str) -> Any:
        """The method's configuration. Raises UnsupportedSettings."""
        raise NotImplementedError

    def _apply(self) -> None:
        self._transformer.enable_cache(self._config)

    def _remove(self) -> None:
        self._transformer.disable_cache()

    def _restarted(self, step: int) -> None:
        """The cache is empty, and `step` is the first one that it will see."""

    def _enter(self, branch: str, latents: torch.Tensor) -> None:
        """A pass begins, inside its cache context."""


class _TeaCache(StepCache):
    """Counts by the context's step index: nothing more to tell."""

    def _configure(self, fingerprint: str) -> TeaCacheConfig:
        config = config_for(self._transformer.config, fingerprint)
        if config is None:
            raise _unknown_weights("teacache", fingerprint)
        return config

    def _apply(self) -> None:
        apply_teacache(self._transformer, self._config)

    def _remove(self) -> None:
        remove_teacache(self._transformer)


class _FirstBlockCache(StepCache):
    """Compares what the first block adds: it counts no steps."""

    def _configure(self, fingerprint: str) -> FirstBlockCacheConfig:
        return FirstBlockCacheConfig(threshold=0.05)


class MagCache(StepCache):
    """Counts its own calls, so it's told the real step before each."""

    hook = MagCacheHeadHook

    def _configure(self, fingerprint: str) -> MagCacheConfig:
        ratios = MAGNITUDES.get(fingerprint[:12])
        if ratios is None:
            raise _unknown_weights("magcache", fingerprint)
        return MagCacheConfig(num_inference_steps=self._steps, mag_ratios=list(ratios))

    def _enter(self, branch: str, latents: torch.Tensor) -> None:
        for hook in self._hooks:
            hook.state_manager.get_state().step_index = self._step


class _TaylorSeer(StepCache):
    """Counts its own calls, and can't predict before it has seen as many steps in a row as its order needs."""

    hook = TaylorSeerCacheHook

    def _configure(self, fingerprint: str) -> TaylorSeerCacheConfig:
        return TaylorSeerCacheConfig(
            # Its own patterns find no module of Wan's. Order and interval are its paper's.
            cache_identifiers=[r"blocks\.\d+\.(attn1|attn2|ffn)"],
            taylor_factors_dtype=self._transformer.dtype,
        )

    def _restarted(self, step: int) -> None:
        whole = max(self._config.disable_cache_before_step, step + self._config.max_order + 1)
        for hook in self._hooks:
            hook.disable_cache_before_step = whole

    def _enter(self, branch: str, latents: torch.Tensor) -> None:
        for hook in self._hooks:
            hook.state_manager.get_state().current_step = self._step - 1  # it adds one before it decides


class _Broadcast(StepCache):
    """Caches of attention outputs: they count their own calls and would mix up the guidance branches.

    diffusers keeps one state per layer, made for pipelines that run both branches in one batch; here each branch has
    its own. In a first step they are told a time outside their window, so that they compute.
    """

    def forget(self) -> None:
        super().forget()
        self._states: dict[tuple[str, int], Any] = {}

    def _enter(self, branch: str, latents: torch.Tensor) -> None:
        for index, hook in enumerate(self._hooks):
            hook.state = self._states.setdefault((branch, index), type(hook.state)())
            hook.state.iteration = self._step

    def _time(self) -> Any:
        return math.inf if self._step == self._first else self._times[self._step]


class _PyramidAttention(_Broadcast):
    hook = PyramidAttentionBroadcastHook

    def _configure(self, fingerprint: str) -> PyramidAttentionBroadcastConfig:
        # Wan's self-attention is spatial and temporal in one: the smaller of the paper's ranges.
        return PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            cross_attention_block_skip_range=6,
            current_timestep_callback=self._time,
        )


class _FasterCache(_Broadcast):
    """Its reuse of self-attention only: its guidance cache needs both branches in one batch, which Wan never runs."""

    hook = FasterCacheBlockHook

    def _configure(self, fingerprint: str) -> FasterCacheConfig:
        return FasterCacheConfig(
            is_guidance_distilled=True,
            attention_weight_callback=lambda module: 0.5,
            current_timestep_callback=self._time,
        )

    def _apply(self) -> None:
        # It would tell at every request that it's experimental.
        log = logging.getLogger("diffusers.hooks.faster_cache")
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            super()._apply()
        finally:
            log.setLevel(level)


class _SeaCache(StepCache):
    """Looks at the latents where the transformer's own forward begins, which isn't called here."""

    hook = SeaCacheRootHook

    def _configure(self, fingerprint: str) -> SeaCacheConfig:
        return SeaCacheConfig()

    def _enter(self, branch: str, latents: torch.Tensor) -> None:
        for hook in self._hooks:
            hook.pre_forward(self._transformer, hidden_states=latents)


class _Count(ModelHook):
    """Counts the calls of a module that really run."""

    def __init__(self, tally: dict[str, int], kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tally = tally
        self._kind = kind

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._tally[self._kind] += 1
        return args, kwargs


def _registry(module: Any) -> Any:
    return HookRegistry.check_if_exists_or_initialize(module)


def _unknown_weights(name: str, fingerprint: str) -> UnsupportedSettings:
    return UnsupportedSettings(
        f"step_cache {name} was never fitted to the weights {fingerprint[:12]}",
        hint="fit it with `python -m chorus_batch.chorus.cachefit`, or use fbcache or seacache, which need no fit",
    )


_CACHES: dict[str, type[StepCache]] = {
    "teacache": _TeaCache,
    "magcache": MagCache,
    "taylorseer": _TaylorSeer,
    "pab": _PyramidAttention,
    "fastercache": _FasterCache,
    "fbcache": _FirstBlockCache,
    "seacache": _SeaCache,
}
