"""The training processes of one run: alone, or joined over gloo/nccl when started by `torchrun`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Processes:
    """This process's rank among `count`."""

    rank: int = 0
    count: int = 1

    @classmethod
    @contextmanager
    def join(cls) -> Iterator[Processes]:
        """The group that `torchrun` started, or this process alone."""
        if not dist.is_torchelastic_launched():
            yield cls()
            return
        dist.init_process_group("gloo")
        try:
            yield cls(dist.get_rank(), dist.get_world_size())
        finally:
            dist.destroy_process_group()

    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Every process gets the mean of all their gradients."""
        if self.count == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        flat /= self.count
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()

    def mean(self, value: float) -> float:
        """The mean of one number over the processes."""
        if self.count == 1:
            return value
        total = torch.tensor(value)
        dist.all_reduce(total)
        return float(total) / self.count
