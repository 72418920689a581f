"""The built-in model: a small WanTransformer3DModel, a linear codec with a detail decoder, and two layers of
MiniLM. Runs on any CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import wan
from ..config import GenerationSettings
from ..errors import UnsupportedSettings, WeightsError
from ..fingerprint import CHECKSUMS, combine, verify
from ..loading import LOADING
from ..model import BUILTIN
from . import text
from .codec import CHANNELS, PATCH
from .decoder import load_codec

KNOWN = "a red circle moves left over a black background"
WEIGHTS = Path(__file__).parent / "weights"
REPAIR = "reinstall the package: pip install --force-reinstall --no-deps chorus-batch"


class TinyModel:
    """The built-in model on one device, in float32. See `chorus.model.VideoModel` for what each method promises."""

    def __init__(self, folder: Path = WEIGHTS, device: str = "cpu", name: str = BUILTIN) -> None:
        """Verifies every weight file, then loads the transformer of that name. Raises WeightsError."""
        verify(folder, _listed(folder), REPAIR)
        card = described(folder)
        self.name = name
        self.fingerprint = fingerprint(folder, name)
        self._sizes = [tuple(size) for size in card["sizes"]]
        self._frames = list(card["frames"])
        self._device = device
        with LOADING:
            self.transformer: Any = wan.load_transformer(transformer_folder(folder, name), device)
            self._codec = load_codec(folder / "codec.safetensors", folder / "decoder.safetensors", device)
            self._text = text.TextEncoder(card["text_layers"], card["text_slots"], card["text_scale"], device)

    def check(self, settings: GenerationSettings) -> None:
        """Raise UnsupportedSettings for a size or length that the model wasn't trained for."""
        if (settings.width, settings.height) not in self._sizes:
            known = ", ".join(f"{w}x{h}" for w, h in self._sizes)
            raise UnsupportedSettings(
                f"{self.name} makes no videos of {settings.width}x{settings.height}", hint=f"it makes {known}"
            )
        if settings.frames not in self._frames:
            known = ", ".join(map(str, self._frames))
            raise UnsupportedSettings(
                f"{self.name} makes no videos of {settings.frames} frames", hint=f"it makes {known}"
            )

    def latent_shape(self, settings: GenerationSettings) -> tuple[int, int, int, int]:
        """[C, T, H, W] of the latents."""
        return CHANNELS, (settings.frames - 1) // 4 + 1, settings.height // PATCH, settings.width // PATCH

    @property
    def text_slots(self) -> int:
        """Text positions that the transformer attends to."""
        return self._text.slots

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, uncut, with [CLS] and [SEP]."""
        return self._text.count_tokens(text)

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """The characters that each text slot stands for."""
        return self._text.token_offsets(text)

    def encode(self, text: str) -> torch.Tensor:
        """Text features [1, slots, 384]."""
        return self._text.encode(text)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Pixels [F, H, W, 3] in 0..1 of latents [C, T, H, W]."""
        video = self._codec.decode(latents.to(self._device, torch.float32)[None])[0]
        return ((video.clamp(-1, 1) + 1) / 2).permute(1, 2, 3, 0)

    def judge(self, prompt: str, frames: npt.NDArray[np.uint8]) -> dict[str, bool] | None:
        """Which attributes that the prompt names the video shows, by the world's checker; None outside its world."""
        from .judge import judge  # takes a while to import, and is needed after the first video only

        return judge(prompt, frames)

    def remark(self, prompt: str) -> str | None:
        """That the video won't show what the prompt asks for, where no object of this world is asked for."""
        from .judge import named

        if named(prompt) is not None:
            return None
        return f"{self.name} knows its own small world only: prompts such as {KNOWN!r}"


def model_names(folder: Path = WEIGHTS) -> list[str]:
    """The models in the folder: they share everything but the transformer. Raises WeightsError."""
    return list(described(folder)["transformers"])


def transformer_folder(folder: Path = WEIGHTS, name: str = BUILTIN) -> Path:
    """Where the transformer of that model lies. Raises WeightsError."""
    known = described(folder)["transformers"]
    if name not in known:
        raise WeightsError(f"{folder} has no model {name!r}", hint=f"it has {', '.join(known)}")
    return folder / str(known[name])


def fingerprint(folder: Path = WEIGHTS, name: str = BUILTIN) -> str:
    """sha256 over names and checksums of the model's weight files and of the text encoder's: what its model card must
    say. Raises WeightsError."""
    others = tuple(f"{part}/" for other, part in described(folder)["transformers"].items() if other != name)
    own = {file: checksum for file, checksum in _listed(folder).items() if not file.startswith(others)}
    return combine(own | {f"minilm/{file}": value for file, value in text.CHECKSUMS.items()})


def described(folder: Path = WEIGHTS) -> Any:
    """What `model.json` says. Raises WeightsError."""
    try:
        found = json.loads((folder / "model.json").read_text("utf-8"))
        if not isinstance(found.get("transformers"), dict):
            raise ValueError("it names no transformers")
    except (OSError, ValueError, AttributeError) as error:
        raise WeightsError(f"{folder / 'model.json'} can't be read: {error}", hint=REPAIR) from error
    return found


def _listed(folder: Path) -> dict[str, str]:
    try:
        listed = json.loads((folder / CHECKSUMS).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"the list of weight files in {folder} can't be read: {error}", hint=REPAIR) from error
    return {str(name): str(checksum) for name, checksum in listed.items()}
