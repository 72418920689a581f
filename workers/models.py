"""An engine for a model card: the built-in model, or weights on this host that are what the card says."""

from __future__ import annotations

from chorus_batch.chorus.engine import Engine
from chorus_batch.jobs import registry, weights
from chorus_batch.jobs.cards.card import ModelCard
from chorus_batch.jobs.settings import Settings


def load_engine(card: ModelCard, settings: Settings, device: str) -> Engine:
    """Check the files against the card, then load them. Raises WeightsRejected and EngineError; nothing is fetched.

    Files that this host has read before, and that have the same size and time of change, aren't read again to be
    checked.
    """
    if card.weights is None:
        engine = Engine.load(card.name, device=device, threads=settings.threads)
    else:
        import torch

        from chorus_batch.chorus.wan_model import WanModel, WanSource

        torch.set_num_threads(settings.threads)
        located = weights.locate(card.weights, settings.models_folder)
        fingerprint = registry.check(card, registry.memory(settings).of(weights.files_of(located)))
        source = WanSource(located.folder, fingerprint, located.checkpoint, located.lora, card.weights.lora_strength)
        engine = Engine(WanModel(card.name, source, device, card.dtype, card.max_prompt_tokens))
    engine.use_attention(settings.attention_backend or None)
    return engine
