"""TeaCache for Wan transformers (arXiv 2411.19108), as hooks on the blocks in diffusers' form: diffusers has none.

How far a step's output will have moved is estimated from its time's embedding alone, by a polynomial fitted to each
model. While the estimates since the last full step stay below a threshold, the blocks don't run: what they added to
their input in the last full step is added again. Each guidance branch has its own memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from diffusers.hooks.hooks import BaseState, HookRegistry, ModelHook, StateManager

_HOOK = "chorus_teacache"


@dataclass(frozen=True)
class TeaCacheConfig:
    """`coefficients` of the polynomial, highest power first; the first `retained` steps of the schedule always run.

    `threshold` is the estimated change, relative to the output, up to which blocks are skipped: higher is faster.
    """

    coefficients: tuple[float, ...]
    threshold: float
    retained: int = 5

    def estimate(self, distance: float) -> float:
        """The output's relative L1 change for that of the time's embedding.

        Never negative; infinite beyond the polynomial's last peak, where it was not fitted and says nothing.
        """
        if distance > _last_peak(self.coefficients):
            return math.inf
        value = 0.0
        for coefficient in self.coefficients:
            value = value * distance + coefficient
        return max(0.0, value)


# (layers, heads) of Wan2.1's text-to-video models: TeaCache's own fits for the projected embedding ("ret-steps"), with
# the thresholds of its moderate settings (https://github.com/ali-vilab/TeaCache, TeaCache4Wan2.1).
WAN: Mapping[tuple[int, int], TeaCacheConfig] = {
    (30, 12): TeaCacheConfig((-5.21862437e4, 9.23041404e3, -5.28275948e2, 1.36987616e1, -4.99875664e-2), 0.05),
    (40, 40): TeaCacheConfig((-3.03318725e5, 4.90537029e4, -2.65530556e3, 5.87365115e1, -3.15583525e-1), 0.1),
}

# Other models, by the first digits of their weights' fingerprint; polynomials printed by `cachefit`.
FITTED: Mapping[str, TeaCacheConfig] = {
    # The built-in model, at 50 steps of 128x128: 26 of 100 passes run.
    "a6956cdaead9": TeaCacheConfig((10346.0157, -1528.32724, 96.7506228, -1.47957093, 0.0135837127), 0.05),
}


def config_for(transformer_config: Any, fingerprint: str) -> TeaCacheConfig | None:
    """The configuration for these weights; None if nobody has fitted one."""
    known = FITTED.get(fingerprint[:12])
    return known or WAN.get((transformer_config.num_layers, transformer_config.num_attention_heads))


class TeaCacheState(BaseState):
    """What one guidance branch remembers."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything: the next step runs."""
        self.time: torch.Tensor | None = None  # the last step's projected embedding [1, 6, dim]
        self.change = 0.0  # estimated since the last full step
        self.entry: torch.Tensor | None = None  # what the first block was given, while the blocks run
        self.residual: torch.Tensor | None = None  # [1, N, dim], what they added in the last full step
        self.running = True

    def enter(self, config: TeaCacheConfig, step: int, time: torch.Tensor, hidden: torch.Tensor) -> None:
        """Decide whether the blocks run in `step` of the schedule; `hidden` [1, N, dim] is what they'd be given."""
        if step < config.retained or self.residual is None or self.time is None:
            self.change = math.inf
        else:
            distance = (time - self.time).abs().mean() / self.time.abs().mean()
            self.change += config.estimate(float(distance))
        self.time = time
        self.running = self.change >= config.threshold
        if self.running:
            self.change, self.entry = 0.0, hidden

    def leave(self, hidden: torch.Tensor) -> None:
        """The blocks ran, and gave `hidden`."""
        assert self.entry is not None
        self.residual, self.entry = hidden - self.entry, None

    def skipped(self, hidden: torch.Tensor) -> torch.Tensor:
        """What stands for the blocks' output where they don't run."""
        assert self.residual is not None
        return hidden + self.residual


class TeaCacheHook(ModelHook):
    """On every block; the first one decides, the last one remembers."""

    def __init__(self, states: StateManager, config: TeaCacheConfig, *, first: bool, last: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_stateful = first
        self._config = config
        self._first = first
        self._last = last
        self.states = states

    def new_forward(
        self,
        module: torch.nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        rotary_emb: Any,
    ) -> torch.Tensor:
        """[1, N, dim] to the same. Raises ValueError where the cache context doesn't tell the step's index."""
        state: TeaCacheState = self.states.get_state()  # type: ignore[no-untyped-call]
        if self._first:
            step = self.states.context.step_index
            if step is None:
                raise ValueError("TeaCache needs cache_context(name, step_index=...)")
            state.enter(self._config, step, temb, hidden_states)
        if not state.running:
            return state.skipped(hidden_states) if self._first else hidden_states
        forward: Any = self.fn_ref.original_forward
        output: torch.Tensor = forward(hidden_states, encoder_hidden_states, temb, rotary_emb)
        if self._last:
            state.leave(output)
        return output

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        """Forget all branches."""
        self.states.reset()
        return module


def apply_teacache(transformer: Any, config: TeaCacheConfig) -> None:
    """Hook a WanTransformer3DModel's blocks. Whoever calls it does so inside `transformer.cache_context`."""
    # It wants the class, whatever its annotation says.
    states = StateManager(cast(Any, TeaCacheState))
    last = len(transformer.blocks) - 1
    for index, block in enumerate(transformer.blocks):
        hook = TeaCacheHook(states, config, first=index == 0, last=index == last)
        HookRegistry.check_if_exists_or_initialize(block).register_hook(hook, _HOOK)
    HookRegistry.check_if_exists_or_initialize(transformer).invalidate_child_registries_cache()


def remove_teacache(transformer: Any) -> None:
    """Take the hooks off again."""
    registry = HookRegistry.check_if_exists_or_initialize(transformer)
    registry.remove_hook(_HOOK, recurse=True)
    registry.invalidate_child_registries_cache()


@lru_cache
def _last_peak(coefficients: tuple[float, ...]) -> float:
    """Beyond it the polynomial only falls; infinity where it rises for ever."""
    polynomial = np.trim_zeros(np.array(coefficients), "f")
    if len(polynomial) < 2 or polynomial[0] > 0:
        return math.inf
    roots = np.roots(np.polyder(polynomial))
    return max((float(root.real) for root in roots if abs(root.imag) < 1e-9), default=-math.inf)
