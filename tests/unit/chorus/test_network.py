"""Laws 2 and 3, and the counts of law 7, on random weights: gathered tokens, amplified keys, the text computed once."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from chorus_batch.chorus.attention import Gain, fast_backends
from chorus_batch.chorus.block import run_block
from chorus_batch.chorus.errors import RegionError, UnsupportedSettings
from chorus_batch.chorus.network import Network

SHAPE = (1, 16, 3, 8, 12)
GRID = (3, 4, 6)
TIME = torch.tensor([500.0])


@pytest.fixture
def network(random_transformer: Any) -> Network:
    return Network(random_transformer)


@pytest.fixture
def latents() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def features() -> torch.Tensor:
    return torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(6))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def velocity(network: Network, latents: torch.Tensor, features: torch.Tensor, **changes: Any) -> torch.Tensor:
    see = changes.pop("see", None)
    return network.velocity(
        latents, network.times(TIME), network.text(features), network.visible(latents, see), **changes
    )


@contextmanager
def calls_of(module: Any) -> Iterator[list[torch.Size]]:
    """The shapes of a module's inputs."""
    seen: list[torch.Size] = []
    hook = module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    try:
        yield seen
    finally:
        hook.remove()


def random_mask(seed: int, share: float = 0.4) -> torch.Tensor:
    return torch.rand(GRID, generator=torch.Generator().manual_seed(seed)) < share


def on_latents(mask: torch.Tensor) -> torch.Tensor:
    return mask.repeat_interleave(2, 1).repeat_interleave(2, 2)


def test_all_tokens_are_the_transformers_own_forward(
    random_transformer: Any, network: Network, latents: torch.Tensor, features: torch.Tensor
) -> None:
    whole = random_transformer(latents, TIME, features, return_dict=False)[0]
    assert torch.equal(velocity(network, latents, features), whole)


def test_seeing_everything_changes_nothing(network: Network, latents: torch.Tensor, features: torch.Tensor) -> None:
    """Law 3."""
    gathered = velocity(network, latents, features, see=torch.ones(GRID, dtype=torch.bool))
    assert (gathered - velocity(network, latents, features)).abs().max() <= 1e-5


def test_a_box_of_tokens_is_computed_as_a_video_of_its_size(
    network: Network, latents: torch.Tensor, features: torch.Tensor
) -> None:
    """Places are relative, so the built-in model can learn what regions are from windows on videos."""
    see = torch.zeros(GRID, dtype=torch.bool)
    see[:, 1:, 1:3] = True
    inside = on_latents(see)
    rows, columns = (inside[0].any(dim=d).nonzero()[:, 0] for d in (1, 0))
    box = latents[..., rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    gathered = velocity(network, latents, features, see=see)[..., inside]
    assert (gathered - velocity(network, box, features).flatten(2)).abs().max() <= 1e-5


@pytest.mark.parametrize("seed", range(4))
def test_a_region_is_computed_as_if_nothing_else_were_there(
    network: Network, latents: torch.Tensor, features: torch.Tensor, seed: int
) -> None:
    """Against full-length attention with everything outside masked out: the definition, not the implementation."""
    see = random_mask(seed)
    gathered = velocity(network, latents, features, see=see)
    hidden_away = torch.where(see.flatten(), 0.0, float("-inf"))[None, None, None]

    def masked(attn: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (inputs[0], None, hidden_away, inputs[3]), kwargs

    hooks = [block.attn1.register_forward_pre_hook(masked, with_kwargs=True) for block in network.transformer.blocks]
    try:
        expected = velocity(network, latents, features)
    finally:
        for hook in hooks:
            hook.remove()
    inside = on_latents(see)
    assert (gathered - expected)[..., inside].abs().max() <= 1e-5
    assert gathered[..., ~inside].abs().max() == 0
    assert not torch.allclose(gathered[..., inside], velocity(network, latents, features)[..., inside], atol=1e-3)


def test_the_blocks_see_the_visible_tokens_only(
    network: Network, latents: torch.Tensor, features: torch.Tensor
) -> None:
    """Law 7: what shrinks is the work."""
    see = random_mask(1)
    for block in network.transformer.blocks:
        for part in (block, block.attn1, block.attn2, block.ffn):
            with calls_of(part) as seen:
                velocity(network, latents, features, see=see)
            assert [shape[1] for shape in seen] == [int(see.sum())]


@pytest.mark.parametrize(
    "see",
    [torch.ones(3, 4, 5, dtype=torch.bool), torch.ones(1, *GRID, dtype=torch.bool), torch.ones(GRID)],
)
def test_a_mask_of_another_shape_is_named(network: Network, latents: torch.Tensor, see: torch.Tensor) -> None:
    with pytest.raises(RegionError, match="token grid"):
        network.visible(latents, see)


def test_gains_of_one_change_no_bit(network: Network, latents: torch.Tensor, features: torch.Tensor) -> None:
    """Law 2."""
    plain = velocity(network, latents, features)
    assert torch.equal(velocity(network, latents, features, gain=Gain((1, 4), 1.0, 1.0)), plain)
    assert torch.equal(velocity(network, latents, features, gain=Gain((), 2.0, 1.0)), plain)
    assert not torch.equal(velocity(network, latents, features, gain=Gain((1, 4), 1.5, 1.0)), plain)
    assert not torch.equal(velocity(network, latents, features, gain=Gain((1, 4), 1.0, 1.5)), plain)


def test_the_gain_multiplies_keys_after_their_norm(
    network: Network, latents: torch.Tensor, features: torch.Tensor
) -> None:
    """Chorus, TGAA: the same as scaling what `norm_k` gave, and the output before it joins the residual."""
    expected_keys = torch.ones(16)
    expected_keys[[2, 7]] = 1.7
    amplified = velocity(network, latents, features, gain=Gain((2, 7), 1.7, 1.3))
    hooks = []
    for block in network.transformer.blocks:
        scale = expected_keys[None, :, None]
        hooks.append(block.attn2.norm_k.register_forward_hook(lambda m, i, out, scale=scale: out * scale))
        hooks.append(block.attn2.register_forward_hook(lambda m, i, out: out * 1.3))
    try:
        expected = velocity(network, latents, features)
    finally:
        for hook in hooks:
            hook.remove()
    assert (amplified - expected).abs().max() <= 1e-5


def test_a_text_is_computed_once(network: Network, latents: torch.Tensor, features: torch.Tensor) -> None:
    attention = network.transformer.blocks[1].attn2
    with calls_of(attention.to_k) as keys, calls_of(attention.to_v) as values, calls_of(attention.to_q) as queries:
        text, times, visible = network.text(features), network.times(TIME), network.visible(latents)
        first = network.velocity(latents, times, text, visible)
        amplified = network.velocity(latents, times, text, visible, gain=Gain((3,), 2.0, 1.0))
        again = network.velocity(latents, times, text, visible)
    assert (len(keys), len(values), len(queries)) == (1, 1, 3)
    assert torch.equal(first, again)
    assert not torch.equal(first, amplified)


def test_two_texts_are_not_mixed_up(network: Network, latents: torch.Tensor, features: torch.Tensor) -> None:
    other = features.flip(1) * 2
    alone = velocity(network, latents, other)
    velocity(network, latents, features)
    assert torch.equal(velocity(network, latents, other), alone)
    assert not torch.equal(velocity(network, latents, features), alone)


def test_watching_changes_nothing_and_sees_every_layer(
    network: Network, latents: torch.Tensor, features: torch.Tensor
) -> None:
    seen: list[tuple[int, torch.Size, torch.Size]] = []
    watched = velocity(
        network, latents, features, watch=lambda layer, query, key: seen.append((layer, query.shape, key.shape))
    )
    assert torch.equal(watched, velocity(network, latents, features))
    assert seen == [(layer, (1, 72, 2, 12), (1, 16, 2, 12)) for layer in (0, 1)]


def test_the_blocks_of_a_gpu_compute_the_same(network: Network, features: torch.Tensor) -> None:
    """`run_block` is what CUDA runs; with the references of its kernels it gives the block's own bits."""
    block = network.transformer.blocks[0]
    hidden = torch.randn(1, 72, 24, generator=torch.Generator().manual_seed(8))
    text, projected = network.text(features).features, network.times(TIME)[1]
    rotary = network.visible(torch.zeros(SHAPE)).rotary
    ours = run_block(block, hidden, lambda normal: block.attn2(normal, text), projected, rotary)
    assert torch.equal(ours, block(hidden, text, projected, rotary))


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        (None, torch.bfloat16, ()),
        ((9, 0), torch.float32, ()),
        ((9, 0), torch.bfloat16, ("_flash_3", "flash")),
        ((8, 6), torch.float16, ("flash",)),
        ((12, 0), torch.bfloat16, ("flash",)),
        ((7, 5), torch.float16, ()),
    ],
)
def test_flash_attention_is_tried_where_a_gpu_can_run_it(
    capability: tuple[int, int] | None, dtype: torch.dtype, expected: tuple[str, ...]
) -> None:
    assert fast_backends(capability, dtype) == expected


def test_a_backend_that_is_not_there_changes_nothing(random_transformer: Any) -> None:
    transformer = copy.deepcopy(random_transformer)
    network = Network(transformer)
    for backend in ("flash", "_flash_3"):
        with pytest.raises(UnsupportedSettings, match=backend):
            network.use_attention(backend)
    assert {block.attn1.processor._attention_backend for block in transformer.blocks} == {None}
    network.use_attention("native")
