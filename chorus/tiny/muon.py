"""Muon: momentum, orthogonalised by Newton-Schulz (Jordan et al., 2024), in float32.

torch.optim.Muon orthogonalises in bfloat16, which is twenty times slower on processors without bfloat16 units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Muon(torch.optim.Optimizer):
    """For matrices, and for convolution kernels as matrices [out, in*rows*columns]; everything else needs another
    optimizer."""

    def __init__(self, matrices: Iterable[torch.nn.Parameter], lr: float = 0.02, momentum: float = 0.95) -> None:
        """`lr` is in units of an orthogonal matrix, so about the same for every size."""
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; matrices of the same shape go together."""
        for group in self.param_groups:
            for shape in sorted({_flat_shape(p) for p in group["params"]}):
                self._update([p for p in group["params"] if _flat_shape(p) == shape], group["lr"], group["momentum"])

    def _update(self, matrices: list[torch.nn.Parameter], lr: float, keep: float) -> None:
        """One batch of matrices of the same shape."""
        updates = []
        for matrix in matrices:
            gradient = matrix.grad if matrix.grad is not None else torch.zeros_like(matrix)
            momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
            momentum.lerp_(gradient, 1 - keep)
            updates.append(gradient.lerp(momentum, keep).flatten(1))
        rows, columns = updates[0].shape
        gain = max(1.0, rows / columns) ** 0.5
        for matrix, update in zip(matrices, orthogonalized(torch.stack(updates)), strict=True):
            matrix.add_(update.view_as(matrix), alpha=-lr * gain)


def split_parameters(
    model: torch.nn.Module, is_matrix: Callable[[str, torch.nn.Parameter], bool]
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Muon's share of a model's parameters, by their names, and what is left for another optimizer."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if is_matrix(name, parameter) else others).append(parameter)
    return matrices, others


def step_all(optimizers: Iterable[tuple[torch.optim.Optimizer, float]], factor: float) -> None:
    """One step of each (optimizer, full rate) at `factor` of its rate; the gradients are used up."""
    for optimizer, rate in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        optimizer.step()
        optimizer.zero_grad()


def _flat_shape(parameter: torch.Tensor) -> tuple[int, int]:
    return parameter.shape[0], parameter[0].numel()


def orthogonalized(matrices: torch.Tensor, steps: int = 4) -> torch.Tensor:
    """[n, rows, columns] -> about the nearest matrices with singular values near one: quintic Newton-Schulz."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: torch.Tensor = x.mT if tall else x
    return result
