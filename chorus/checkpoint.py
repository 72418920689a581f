"""A generation between two steps: what a stopped job needs to go on as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from .errors import CorruptLatents
from .latents import digest, read_header

FORMAT = "chorus-checkpoint/1"
# What diffusers' schedulers change while they step, beside their place in the schedule. A list may hold None.
_HISTORY = ("model_outputs", "timestep_list", "lower_order_nums", "last_sample", "this_order")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """x[step], [1, C, T, H, W] float32; the solver's history; the x[k] kept so far; the evidence summed up so far.

    `identity` names the generation: request, reuse and what is kept. A checkpoint is good for no other.
    """

    identity: str
    step: int
    latents: torch.Tensor
    solver: Mapping[str, Any]
    kept: Mapping[int, torch.Tensor]
    evidence: torch.Tensor | None = None
    passes: tuple[int, ...] = field(default=())  # tokens of each pass so far, for the trace
    step_seconds: tuple[float, ...] = field(default=())


def solver_state(scheduler: Any) -> dict[str, Any]:
    """A scheduler's history: numbers, tensors, None, and lists of them."""
    return {name: _copied(getattr(scheduler, name)) for name in _HISTORY if hasattr(scheduler, name)}


def restore_solver(scheduler: Any, state: Mapping[str, Any], device: torch.device) -> None:
    """Give a fresh scheduler, its begin index set, the history of another."""
    for name, value in state.items():
        setattr(scheduler, name, _moved(value, device))


def pack(checkpoint: Checkpoint) -> bytes:
    """As safetensors, with a checksum inside."""
    tensors: dict[str, torch.Tensor] = {"latents": checkpoint.latents}
    tensors |= {f"kept_{k:05d}": latents for k, latents in checkpoint.kept.items()}
    if checkpoint.evidence is not None:
        tensors["evidence"] = checkpoint.evidence
    solver = {name: _split(f"solver_{name}", value, tensors) for name, value in checkpoint.solver.items()}
    tensors = {name: tensor.detach().to("cpu").clone().contiguous() for name, tensor in tensors.items()}
    header = {
        "format": FORMAT,
        "identity": checkpoint.identity,
        "step": checkpoint.step,
        "solver": solver,
        "passes": list(checkpoint.passes),
        "step_seconds": list(checkpoint.step_seconds),
    }
    text = json.dumps(header, sort_keys=True)
    return save(tensors, {"chorus": json.dumps([text, digest(text, tensors)])})


def unpack(data: bytes) -> Checkpoint:
    """What `pack` was given. Raises CorruptLatents for anything else."""
    try:
        tensors = load(data)
        text, written = read_header(data)
        header = json.loads(text)
        if digest(text, tensors) != written or header["format"] != FORMAT:
            raise ValueError("it isn't what was written")
        return Checkpoint(
            identity=header["identity"],
            step=header["step"],
            latents=tensors["latents"],
            solver={name: _joined(value, tensors) for name, value in header["solver"].items()},
            kept={int(name[5:]): tensor for name, tensor in tensors.items() if name.startswith("kept_")},
            evidence=tensors.get("evidence"),
            passes=tuple(header["passes"]),
            step_seconds=tuple(header["step_seconds"]),
        )
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CorruptLatents(f"the checkpoint can't be read: {error}", hint="start the generation again") from error


def _split(name: str, value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The value as JSON; tensors in it are put aside and named."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, list):
        return [_split(f"{name}_{i}", each, tensors) for i, each in enumerate(value)]
    return value


def _joined(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        return tensors[value["tensor"]]
    return [_joined(each, tensors) for each in value] if isinstance(value, list) else value


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_moved(each, device) for each in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
