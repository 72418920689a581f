"""Attention processors for diffusers' Wan transformer: keys and values of the text once per request, amplified tokens.

TGAA (Chorus, arXiv 2604.04451, section 4): in the text cross-attention, after `norm_k`, the keys of the tokens that
the source's prompt lacks are multiplied by gamma_k, and the attention's output by gamma_o before it joins the residual.
Both processors compute what diffusers' own one does, in the same order, so that without gain the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from chorus_batch.kernels.gain import key_gain
from chorus_batch.kernels.rope import rope

Watch = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Called with (layer, query [1, N, heads, D], key [1, S, heads, D]) of a text cross-attention, after the norms."""


@dataclass
class Text:
    """One guidance branch's text in one request: its features, and its keys and values by layer once they're known.

    The text doesn't change over the steps, so neither do they; only the gain does.
    """

    features: torch.Tensor  # [1, S, dim], after the transformer's text embedder
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # [1, S, dim] each


@dataclass(frozen=True)
class Gain:
    """gamma_k and gamma_o of one step, and the text tokens whose keys are amplified."""

    tokens: Sequence[int]
    key: float
    output: float


@dataclass
class Passing:
    """What the processors have to know of the pass that is running. Shared by all layers of one transformer."""

    text: Text | None = None  # None: somebody else calls the transformer
    gain: Gain | None = None
    watch: Watch | None = None


def fast_backends(capability: tuple[int, int] | None, dtype: torch.dtype) -> tuple[str, ...]:
    """The backends of diffusers' dispatcher to try before its own choice, the fastest first: FlashAttention 3, then 2.

    `capability` is the GPU's, None on a CPU. Version 3 is for Hopper, both are for half precision.
    """
    if capability is None or dtype not in (torch.float16, torch.bfloat16):
        return ()
    return (*(("_flash_3",) if capability[0] == 9 else ()), *(("flash",) if capability >= (8, 0) else ()))


class SelfAttention:
    """Self-attention with rotary positions from a table: any subset of tokens keeps its own places."""

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """[1, N, dim] to [1, N, dim]; `rotary_emb` is (cos, sin), [1, N, 1, D] each."""
        heads = (attn.heads, -1)
        query = queries(attn, hidden_states)
        key = attn.norm_k(attn.to_k(hidden_states)).unflatten(2, heads)
        value = attn.to_v(hidden_states).unflatten(2, heads)
        if rotary_emb is not None:
            query, key = rope(query, *rotary_emb), rope(key, *rotary_emb)
        return attend(self, attn, query, key, value, attention_mask, self._parallel_config)


class TextAttention:
    """Cross-attention to the text, in one layer."""

    _attention_backend = None
    _parallel_config = None

    def __init__(self, layer: int, passing: Passing) -> None:
        self._layer = layer
        self._passing = passing

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """[1, N, dim] to [1, N, dim]; `encoder_hidden_states` [1, S, dim] is the embedded text."""
        gain, watch = self._passing.gain, self._passing.watch
        query = queries(attn, hidden_states)
        key, value = self.keys_and_values(attn, encoder_hidden_states)
        if watch is not None:
            watch(self._layer, query, key)
        # Not parallel: every device holds the whole text.
        output = attend(self, attn, query, key, value, attention_mask, None)
        return output if gain is None or gain.output == 1.0 else output * gain.output

    def keys_and_values(self, attn: Any, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the text that is passing, [1, S, heads, D] each, the keys amplified; `features` [1, S, dim]."""
        key, value = self._text(attn, features)
        gain = self._passing.gain
        if gain is not None and gain.key != 1.0 and gain.tokens:
            key = key_gain(key, gain.tokens, gain.key)
        heads = (*key.shape[:2], attn.heads, -1)
        return key.reshape(heads), value.reshape(heads)

    def _text(self, attn: Any, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        text = self._passing.text
        known = text.layers.get(self._layer) if text is not None else None
        if known is None:
            known = attn.norm_k(attn.to_k(features)), attn.to_v(features)
            if text is not None:
                text.layers[self._layer] = known
        return known


def queries(attn: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[1, N, heads, D], after their norm, of hidden [1, N, dim]."""
    found: torch.Tensor = attn.norm_q(attn.to_q(hidden)).unflatten(2, (attn.heads, -1))
    return found


def attend(
    processor: Any,
    attn: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    parallel: Any,
) -> torch.Tensor:
    """Attention by diffusers' dispatcher, which knows the backends, and the output projection."""
    output = dispatch_attention_fn(
        query, key, value, attn_mask=mask, dropout_p=0.0, is_causal=False,
        backend=processor._attention_backend, parallel_config=parallel,
    )  # fmt: skip
    projected: torch.Tensor = attn.to_out[1](attn.to_out[0](output.flatten(2, 3).type_as(query)))
    return projected
