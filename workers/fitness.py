"""Tries an attention backend and torch.compile out on the device, before a worker starts: see `jobs.fitness`."""

from __future__ import annotations

import json
import sys

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from chorus_batch.chorus.errors import EngineError
from chorus_batch.chorus.network import Network
from chorus_batch.jobs.cards.card import load_card
from chorus_batch.jobs.errors import ChorusBatchError
from chorus_batch.jobs.fitness import REFUSED
from chorus_batch.jobs.settings import Settings, load_settings
from chorus_batch.workers.runtime import chosen_device


def try_out(settings: Settings) -> None:
    """On one block with heads like Wan's, in the model's dtype. Raises EngineError and ChorusBatchError."""
    card = load_card(settings.model, settings.models_folder)
    model = WanTransformer3DModel(
        num_attention_heads=1, attention_head_dim=128, text_dim=64, freq_dim=64, ffn_dim=128, num_layers=1
    )
    network = Network(model.to(chosen_device(settings), getattr(torch, card.dtype)).eval().requires_grad_(False))
    if settings.attention_backend:
        network.use_attention(settings.attention_backend)
    if settings.compile:
        network.use_compiler()


def main() -> None:
    """Exit codes and output as `jobs.fitness` reads them."""
    try:
        try_out(load_settings())
    except (EngineError, ChorusBatchError) as error:
        print(json.dumps({"message": str(error), "hint": error.hint}))
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
