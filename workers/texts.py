"""Text features through the object store: each text is encoded once for all batches, many at a time, ahead of use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch

from chorus_batch.chorus.errors import CorruptFeatures
from chorus_batch.chorus.features import pack, unpack
from chorus_batch.chorus.wan_model import WanModel
from chorus_batch.jobs import keys
from chorus_batch.jobs.errors import ObjectCorrupt, ObjectMissing
from chorus_batch.jobs.storage import ObjectStore

log = logging.getLogger(__name__)

AHEAD = 512  # texts that are encoded at once, so that the encoder is seldom needed


class Texts:
    """The texts of one model. Bit for bit what the model's own `encode` gives, wherever they come from."""

    def __init__(self, model: WanModel, store: ObjectStore, encoder: str) -> None:
        """`encoder`: sha256 (hex) of all that the features depend on beside the text."""
        self._model = model
        self._store = store
        self._encoder = encoder
        self._held: dict[str, torch.Tensor] = {}  # of the job that runs

    def prepare(
        self,
        wanted: Iterable[str],
        upcoming: Callable[[], Sequence[str]],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> int:
        """Have the features of a job's texts ready. If one is nowhere, those of `upcoming` are encoded and stored too.

        Returns how many were encoded. Raises StorageError and EngineError.
        """
        found = {text: self._held[text] if text in self._held else self._fetched(text) for text in wanted}
        self._held = {text: features for text, features in found.items() if features is not None}
        missing = [text for text in found if text not in self._held]
        if not missing:
            return 0
        ahead = [text for text in dict.fromkeys(upcoming()) if text not in found and not self._is_stored(text)]
        encoded = 0
        with torch.inference_mode(), self._model.encoding():
            for text in [*missing, *ahead]:
                if encoded >= len(missing) and should_stop():
                    break
                features = self._model.encode(text)
                self._store.put(self._key(text), pack(features, text), "application/octet-stream")
                if text in found:
                    self._held[text] = features
                encoded += 1
        return encoded

    def features(self, text: str) -> torch.Tensor:
        """Features [1, slots, D] of a text; encoded here if `prepare` wasn't told of it."""
        return self._held[text] if text in self._held else self._model.encode(text)

    def _fetched(self, text: str) -> torch.Tensor | None:
        try:
            features = unpack(self._store.get(self._key(text)), text)
        except ObjectMissing:
            return None
        except (ObjectCorrupt, CorruptFeatures) as error:
            log.warning("a text is encoded again: %s", error)
            return None
        transformer = self._model.transformer
        return features.to(transformer.device, transformer.dtype)

    def _is_stored(self, text: str) -> bool:
        return self._store.exists(self._key(text))

    def _key(self, text: str) -> str:
        return keys.text_key(self._encoder, text)
