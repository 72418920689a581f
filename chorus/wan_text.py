"""Wan's text features: UMT5 over a prompt of up to 512 tokens, padded with zeros."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from . import wan
from .errors import NoOffsets, WeightsError

SLOTS = 512  # what Wan was trained with; diffusers' pipeline cuts at 226 unless told otherwise


class WanText:
    """Tokenizer and text encoder of a folder in diffusers' layout. Texts must be cleaned."""

    def __init__(
        self, folder: Path, device: str, dtype: torch.dtype, slots: int = SLOTS, *, later: bool = False
    ) -> None:
        """Loads both; with `later` the encoder when a text is first encoded. Raises WeightsError."""
        # Here: it takes seconds, and the built-in model does without.
        from transformers import AutoTokenizer

        self.slots = slots
        self._device = device
        if not (folder / "tokenizer" / "tokenizer_config.json").is_file():
            raise WeightsError(f"there is no tokenizer in {folder / 'tokenizer'}", hint=wan.FETCH)
        self._tokenizer: Any = wan.guarded(
            lambda: AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True),
            f"the tokenizer in {folder / 'tokenizer'}",
        )
        self._folder, self._dtype = folder / "text_encoder", dtype
        self._encoder: Any = None
        if not later:
            self._load()
        self.width = wan.guarded(self._width, f"the configuration in {self._folder}")  # values of a token

    @property
    def loaded(self) -> bool:
        """Whether the encoder's weights are in memory."""
        return self._encoder is not None

    def park(self) -> None:
        """Move the encoder to the host's memory, until a text is encoded again."""
        if self._encoder is not None:
            self._encoder.to("cpu")

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, uncut, with the end-of-sequence one."""
        return len(self._tokenizer(text, verbose=False).input_ids)

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """The characters that each text slot stands for, cut as `encode` cuts. Raises NoOffsets."""
        if not self._tokenizer.is_fast:
            raise NoOffsets(
                "the model's tokenizer gives no character offsets", hint="add a tokenizer.json to its tokenizer folder"
            )
        found = self._tokenizer(text, max_length=self.slots, truncation=True, return_offsets_mapping=True)
        return [(int(start), int(end)) for start, end in found.offset_mapping]

    def encode(self, text: str) -> torch.Tensor:
        """Features [1, slots, D] in the encoder's dtype, on its device, 0 beyond the text.

        As diffusers' pipeline: the padding goes through the layers too, masked; without it the last bits are others.
        """
        tokens = self._tokenizer(
            [text],
            padding="max_length",
            max_length=self.slots,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        self._load()
        ids, mask = tokens.input_ids.to(self._device), tokens.attention_mask.to(self._device)
        hidden: torch.Tensor = self._encoder(ids, mask).last_hidden_state
        count = int(tokens.attention_mask.sum())
        return torch.nn.functional.pad(hidden[:, :count], (0, 0, 0, self.slots - count))

    def _load(self) -> None:
        """The encoder, on its device. Raises WeightsError."""
        if self._encoder is None:
            from transformers.models.umt5.modeling_umt5 import UMT5EncoderModel

            encoder = wan.load_component(UMT5EncoderModel, self._folder, self._dtype)
            self._encoder = encoder.eval().requires_grad_(False)
        try:
            self._encoder.to(self._device)
        except torch.OutOfMemoryError:
            self._encoder = None  # a part of it may be on the device
            raise

    def _width(self) -> int:
        return int(json.loads((self._folder / "config.json").read_text("utf-8"))["d_model"])
