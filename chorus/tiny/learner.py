"""A transformer that learns: its weights, their two optimizers, and the state of all three."""

from __future__ import annotations

from typing import Any

import torch

from .muon import Muon, split_parameters, step_all


class Learner:
    """`model` with Muon on its blocks' matrices and AdamW on the rest."""

    def __init__(self, model: torch.nn.Module, muon_lr: float, adam_lr: float, *, compiled: bool) -> None:
        """`model` itself learns, not a copy; the rates are the full ones (`update`)."""
        self.model = model.train().requires_grad_(True)
        self.forward: Any = torch.compile(model, dynamic=False) if compiled else model
        matrices, others = split_parameters(model, is_matrix)
        self.muon = Muon(matrices, lr=muon_lr)
        self.adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.rates = (self.muon, muon_lr), (self.adam, adam_lr)

    def state(self) -> dict[str, Any]:
        """What `load` takes."""
        return {
            "model": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes up a `state`; whatever else is in it is left alone."""
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])

    def update(self, factor: float) -> None:
        """One step of both optimizers at `factor` of their rates; the gradients are used up."""
        step_all(self.rates, factor)


def is_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether it is Muon's (the blocks' matrices) or AdamW's (embeddings, norms, biases, modulation, last layer)."""
    return name.startswith("blocks.") and parameter.ndim == 2
