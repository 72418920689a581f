"""FLOPs from shapes are those that torch's own counter sees."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from chorus_batch.chorus.cost import forward_flops, split_flops, text_flops, tokens_of
from chorus_batch.chorus.engine import Engine


@pytest.mark.parametrize(("shape", "slots"), [((16, 3, 16, 16), 16), ((16, 1, 4, 8), 5)])
def test_flops_equal_torchs_counter(random_transformer: Any, shape: tuple[int, ...], slots: int) -> None:
    x, text = torch.randn(1, *shape), torch.randn(1, slots, 32)
    # The counter knows the CPU's fused attention not at all, but the matrix products of the plain one.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        random_transformer(x, torch.tensor([500.0]), text)
    config = random_transformer.config
    dim = 24
    times = 2 * (256 * dim + dim * dim + 6 * dim * dim)  # left out: a step's, whatever it computes
    counted = forward_flops(config, tokens_of(config, shape), slots) + text_flops(config, slots) + times
    assert counted == counter.get_total_flops()


def test_a_region_costs_its_share_and_attention_its_square(random_transformer: Any) -> None:
    quadratic, linear = split_flops(random_transformer.config, 16)
    for tokens in (1, 10, 48):
        assert forward_flops(random_transformer.config, tokens, 16) == quadratic * tokens**2 + linear * tokens


def test_the_builtin_model_has_192_tokens(engine: Engine) -> None:
    assert tokens_of(engine.model.transformer.config, (16, 3, 16, 16)) == 192
