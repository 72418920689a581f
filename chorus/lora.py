"""Low-rank and full differences of weights (LoRA), added to a transformer once, when it's loaded.

A file holds, for each layer that it changes, some of: `lora_down` and `lora_up` (or `lora_A` and `lora_B`), whose
product times alpha/rank is added to the weight; `diff`, added to the weight as it is; `diff_b` to the bias; `diff_m` to
the modulation table. diffusers' own loader leaves out what it doesn't know (`diff` of norms, `diff_m`); here whatever
can't be added is an error, for a distilled model with half of its differences makes no sense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import wan
from .errors import WeightsError

# Ending of a key -> what it is. The first ones end like others: order matters.
ROLES = {
    ".lora_B.bias": "bias",
    ".lora_A.weight": "down",
    ".lora_down.weight": "down",
    ".lora_B.weight": "up",
    ".lora_up.weight": "up",
    ".alpha": "alpha",
    ".diff_b": "bias",
    ".diff_m": "modulation",
    ".diff": "weight",
}
THEIRS, OURS = "diffusion_model.", "transformer."  # what keys begin with: Wan's own names follow, or diffusers'

_Delta = Callable[[torch.device], torch.Tensor]


@dataclass(frozen=True)
class _Change:
    parameter: torch.nn.Parameter
    keys: tuple[str, ...]
    delta: _Delta


def fuse(transformer: Any, path: Path, strength: float) -> int:
    """Add a LoRA file's differences times `strength` to a transformer's weights; how many keys the file has.

    Sums are made in float32 on the transformer's device and rounded once to the weight's own dtype. Unless every key of
    the file can be applied, WeightsError is raised before anything is changed.
    """
    state = wan.guarded(lambda: wan.read_tensors(path), f"the LoRA {path}")
    changes = _changes(dict(transformer.named_parameters()), state)
    applied = {key for change in changes for key in change.keys}
    left = sorted(state.keys() - applied)
    if left or not state:
        raise WeightsError(
            f"{len(left)} of the {len(state)} keys of the LoRA {path.name} fit nothing in the transformer: "
            f"{', '.join(left[:3])}{' ...' if left[3:] else ''}",
            hint="it was made for another model: use one for this Wan, or leave it out",
        )
    with torch.no_grad():
        for change in changes:
            weight = change.parameter
            delta = change.delta(weight.device).reshape(weight.shape)
            weight.copy_((weight.float() + strength * delta).to(weight.dtype))
    return len(state)


def _changes(parameters: Mapping[str, torch.nn.Parameter], state: Mapping[str, torch.Tensor]) -> list[_Change]:
    """What of the file fits the transformer's parameters, in name and shape."""
    layers: dict[str, dict[str, str]] = {}  # layer, as the file names it -> role -> key
    for key in state:
        ending = next((each for each in ROLES if key.endswith(each)), None)
        if ending is not None:
            layers.setdefault(key.removesuffix(ending), {})[ROLES[ending]] = key
    changes = []
    for layer, roles in layers.items():
        for of, ending in (("weight", ".weight"), ("bias", ".bias"), ("modulation", ".modulation")):
            parameter = _parameter(parameters, layer, ending)
            if parameter is None:
                continue
            if of in roles:
                changes += _fitting(parameter, (roles[of],), _plain(state[roles[of]]))
            if of == "weight" and "down" in roles and "up" in roles:
                keys = tuple(roles[role] for role in ("down", "up", "alpha") if role in roles)
                changes += _fitting(parameter, keys, _product(*(state[key] for key in keys)))
    return changes


def _parameter(parameters: Mapping[str, torch.nn.Parameter], layer: str, ending: str) -> torch.nn.Parameter | None:
    """The transformer's parameter of a layer of the file, which has diffusers' names or those of Wan's own releases."""
    name = layer + ending
    if name.startswith(OURS):
        name = name.removeprefix(OURS)
    else:
        name = wan.diffusers_names([name.removeprefix(THEIRS)]).popitem()[1]
    # Tables are parameters themselves, with no `.weight`.
    found = parameters.get(name)
    return parameters.get(name.removesuffix(".weight")) if found is None else found


def _plain(tensor: torch.Tensor) -> _Delta:
    return lambda device: tensor.to(device).float()


def _product(down: torch.Tensor, up: torch.Tensor, alpha: torch.Tensor | None = None) -> _Delta:
    """up @ down * alpha/rank; a convolution's are flattened."""
    scale = 1.0 if alpha is None else float(alpha) / down.shape[0]
    return lambda device: scale * (up.to(device).float().flatten(1) @ down.to(device).float().flatten(1))


def _fitting(parameter: torch.nn.Parameter, keys: tuple[str, ...], delta: _Delta) -> list[_Change]:
    """The change, if its delta has the parameter's shape; a convolution's may be flattened."""
    try:
        shape = delta(torch.device("meta")).shape  # computes no values
    except (RuntimeError, IndexError):
        return []
    fits = shape == parameter.shape or (len(shape) == 2 and shape == parameter.flatten(1).shape)
    return [_Change(parameter, keys, delta)] if fits else []
