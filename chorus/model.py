"""What the engine needs of a model: everything that is not the denoising itself."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from .config import GenerationSettings

BUILTIN = "builtin"  # the model that comes with the program


class VideoModel(Protocol):
    """A text-to-video model: a Wan transformer of diffusers with its text encoder and latent codec.

    Texts come cleaned as diffusers cleans them (jobs' `clean_prompt`), and aren't cleaned again: twice isn't once.
    """

    name: str
    fingerprint: str
    """sha256, hex: changes with any byte of any weight, text encoder included."""
    transformer: Any
    """diffusers' WanTransformer3DModel, in evaluation mode, on its device."""

    def check(self, settings: GenerationSettings) -> None:
        """Raise UnsupportedSettings where the model can't make such a video."""

    def latent_shape(self, settings: GenerationSettings) -> tuple[int, int, int, int]:
        """[C, T, H, W] of the latents."""

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, uncut, with the special ones."""

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """The characters of the text that each text slot stands for, cut as `encode` cuts; (0, 0) for a special one.

        Raises NoOffsets where the tokenizer can't tell.
        """

    @property
    def text_slots(self) -> int:
        """Text positions that the transformer attends to; longer texts are cut."""

    def encode(self, text: str) -> torch.Tensor:
        """Text features [1, slots, D] on the transformer's device and in its dtype."""

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Pixels [F, H, W, 3] in 0..1, float32, of latents [C, T, H, W]."""

    def judge(self, prompt: str, frames: npt.NDArray[np.uint8]) -> dict[str, bool] | None:
        """Which attributes that the prompt names the finished video [F, H, W, 3] shows; None where nobody can tell."""

    def remark(self, prompt: str) -> str | None:
        """What a person should know of this prompt's video, for the trace; mostly None."""
