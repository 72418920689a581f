"""Text features for batches, with the settings that the built-in model is trained with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from .text import TextEncoder

LAYERS = 2
SLOTS = 32
SCALE = 0.58  # the standard deviation of the hidden states


class BatchEncoder(TextEncoder):
    """What `TextEncoder` gives, for many texts at once: texts of the same length share a batch, so none is padded."""

    def __init__(self, device: str = "cpu", slots: int = SLOTS) -> None:
        """Loads the packaged weights. Raises WeightsError."""
        super().__init__(LAYERS, slots, SCALE, device)

    @torch.no_grad()
    def encode_all(self, texts: Sequence[str]) -> torch.Tensor:
        """[n, slots, 384]; the empty string is the unconditional input."""
        by_length: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        for row, encoding in enumerate(self._tokenizer.encode_batch(list(texts))):
            ids = encoding.ids
            if len(ids) > self.slots:
                ids = [*ids[: self.slots - 1], ids[-1]]
            by_length[len(ids)].append((row, ids))
        features = torch.zeros(len(texts), self.slots, self._bert.config.hidden_size, device=self.device)
        for length, group in by_length.items():
            rows = [row for row, _ in group]
            hidden = self._bert(torch.tensor([ids for _, ids in group], device=self.device)).last_hidden_state
            features[rows, :length] = hidden / self.scale
        return features
