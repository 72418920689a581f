"""One block of a Wan transformer, as a function: what a GPU runs, and what torch.compile compiles.

All blocks of a transformer share one compilation, for their weights are inputs of it. A new number of tokens needs a
new one, which takes seconds; regions are therefore widened to few numbers of tokens (`regions.widen`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from chorus_batch.kernels.modulate import modulate

from .attention import attend, queries

log = logging.getLogger(__name__)

MOST = 64  # shapes that are compiled: all of them are tried, one after the other, in each call


def run_block(
    block: Any,
    hidden: torch.Tensor,
    read: Callable[[torch.Tensor], torch.Tensor],
    projected: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """[1, N, dim] to the same, as `WanTransformerBlock.forward`; norm, scale and shift are one kernel.

    `read` is the block's cross-attention to the text, [1, N, dim] to the same.
    """
    table = block.scale_shift_table + projected.float()
    shift, scale, gate, shift_ffn, scale_ffn, gate_ffn = table.chunk(6, dim=1)
    attended = block.attn1(modulate(hidden, scale, shift, block.norm1.eps), None, None, rotary)
    hidden = (hidden.float() + attended * gate).type_as(hidden)
    hidden = hidden + read(block.norm2(hidden.float()).type_as(hidden))
    fed = block.ffn(modulate(hidden, scale_ffn, shift_ffn, block.norm3.eps))
    result: torch.Tensor = (hidden.float() + fed.float() * gate_ffn).type_as(hidden)
    return result


class CompiledBlock:
    """`run_block`, compiled anew for each number of tokens, and no more often. Not for several threads at once."""

    def __init__(self, backend: str = "inductor") -> None:
        """`backend`: one of torch.compile's. Nothing is compiled yet."""
        self.backend = backend
        self.compilations = 0
        self._shapes: set[tuple[torch.Size, torch.dtype]] = set()
        self._warned = False
        # Whole graphs of fixed shapes: what can't be traced is an error, not a piece that runs slowly unnoticed.
        compile_: Any = torch.compile  # its types lack the last two
        self._run = compile_(
            _block,
            fullgraph=True,
            dynamic=False,
            backend=self._compile,
            recompile_limit=4 * MOST,
            isolate_recompiles=True,
        )

    def takes(self, hidden: torch.Tensor) -> bool:
        """Whether tokens [1, N, dim] go through here: where too many shapes were compiled, those of another don't."""
        shape = hidden.shape, hidden.dtype
        if shape not in self._shapes and len(self._shapes) >= MOST:
            if not self._warned:
                log.warning("%d shapes are compiled: those of others run uncompiled from now on", MOST)
                self._warned = True
            return False
        self._shapes.add(shape)
        return True

    def __call__(
        self,
        block: Any,
        hidden: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lift: torch.Tensor,
        projected: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens [1, N, dim] behind the block, and its queries of the text [1, N, heads, D].

        `key` and `value` [1, S, heads, D] are the text's, `lift` [] is gamma_o: what the output is multiplied by.
        """
        result: tuple[torch.Tensor, torch.Tensor] = self._run(block, hidden, key, value, lift, projected, rotary)
        return result

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        from torch._dynamo import lookup_backend  # takes a second

        self.compilations += 1
        return lookup_backend(self.backend)(graph, inputs)


def _block(
    block: Any,
    hidden: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lift: torch.Tensor,
    projected: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    asked: list[torch.Tensor] = []

    def read(normal: torch.Tensor) -> torch.Tensor:
        asked.append(queries(block.attn2, normal))
        return attend(block.attn2.processor, block.attn2, asked[0], key, value, None, None) * lift

    return run_block(block, hidden, read, projected, rotary), asked[0]
