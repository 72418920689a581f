"""The forward pass of a small BERT encoder in numpy: what `submit` needs of a neural network.

Written out because a library for it would have to be imported, and installed, by every producer: importing torch alone
takes longer than embedding a hundred prompts, and numpy's matrix products are as fast as its own on a CPU (45 and 47
prompts of 15 words a second on two busy cores).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Weights = Mapping[str, Floats]  # by the names of transformers' BertModel

_PART = 1 << 15  # numbers that are worked on at once: 128 KiB
_FAR = np.float32(-1e30)  # a score that softmax makes 0


def last_layer(weights: Weights, ids: NDArray[np.int64], mask: NDArray[np.bool_], layers: int, heads: int) -> Floats:
    """What the last of `layers` gives: ids, mask [batch, tokens] -> float32 [batch, tokens, width].

    Post-norm, exact GELU, as in Devlin et al. (arXiv 1810.04805); `mask` is False where a row is padded.
    """
    batch, tokens = ids.shape
    table = "embeddings.{}_embeddings.weight".format
    x = weights[table("word")][ids] + weights[table("position")][:tokens] + weights[table("token_type")][0]
    x = _norm(weights, x, "embeddings.LayerNorm")
    far = np.where(mask, np.float32(0), _FAR)[:, None, None, :]
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        q, k, v = (
            _linear(weights, x, f"{name}.attention.self.{part}").reshape(batch, tokens, heads, -1).transpose(0, 2, 1, 3)
            for part in ("query", "key", "value")
        )
        scores = q @ k.transpose(0, 1, 3, 2) / np.float32(q.shape[-1] ** 0.5) + far
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        seen = (scores / scores.sum(-1, keepdims=True)) @ v
        seen = seen.transpose(0, 2, 1, 3).reshape(batch, tokens, -1)
        x = _norm(
            weights, x + _linear(weights, seen, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm"
        )
        wide = _gelu(_linear(weights, x, f"{name}.intermediate.dense"))
        x = _norm(weights, x + _linear(weights, wide, f"{name}.output.dense"), f"{name}.output.LayerNorm")
    return x


def _linear(weights: Weights, x: Floats, name: str) -> Floats:
    # Flat: numpy would make one small product for each row of the batch.
    out: Floats = x.reshape(-1, x.shape[-1]) @ weights[f"{name}.weight"].T
    out += weights[f"{name}.bias"]
    return out.reshape(*x.shape[:-1], -1)


def _norm(weights: Weights, x: Floats, name: str) -> Floats:
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    out: Floats = centred / np.sqrt(variance + np.float32(1e-12)) * weights[f"{name}.weight"] + weights[f"{name}.bias"]
    return out


def _gelu(x: Floats) -> Floats:
    """x * (1 + erf(x / sqrt 2)) / 2, in place: for a part at a time, as the caches of a CPU don't hold all of it.

    erf to 1.5e-7, which is what float32 holds (Abramowitz and Stegun, 7.1.26).
    """
    flat = x.reshape(-1)
    for start in range(0, len(flat), _PART):
        part = flat[start : start + _PART]
        size = np.abs(part)
        size *= np.float32(0.5**0.5)
        t = size * np.float32(0.3275911)
        t += 1
        np.reciprocal(t, out=t)
        tail = t * np.float32(1.061405429)
        for term in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
            tail += np.float32(term)
            tail *= t
        size *= size
        np.negative(size, out=size)
        np.exp(size, out=size)
        tail *= size  # 1 - erf(|x| / sqrt 2)
        np.subtract(1, tail, out=tail)
        np.copysign(tail, part, out=tail)
        tail += 1
        part *= tail
        part *= np.float32(0.5)
    return x
