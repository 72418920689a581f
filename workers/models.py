"""An engine for a model card: the built-in model, or weights on this host that are what the card says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chorus_batch.chorus.config import GenerationSettings
from chorus_batch.chorus.engine import Engine
from chorus_batch.jobs import memory, registry, weights
from chorus_batch.jobs.auxiliary import auxiliaries
from chorus_batch.jobs.cards.card import ModelCard
from chorus_batch.jobs.claims import DomainRecord
from chorus_batch.jobs.settings import Settings
from chorus_batch.jobs.storage import ObjectStore

if TYPE_CHECKING:  # it brings diffusers' Wan, which the built-in model loads by itself
    from chorus_batch.workers.texts import Texts


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
        turns = _turns(card, device, settings)
        model = WanModel(card.name, source, device, card.dtype, card.max_prompt_tokens, text_later=True, turns=turns)
        engine = Engine(model)
    engine.use_attention(settings.attention_backend or None)
    if settings.compile:
        engine.use_compiler()
    return engine


def load_texts(card: ModelCard, engine: Engine, store: ObjectStore, device: str) -> Texts | None:
    """Where a model's text features come from, put into its engine; None for one that encodes in no time."""
    import torch
    import transformers

    from chorus_batch.chorus.wan_model import WanModel
    from chorus_batch.workers.texts import Texts

    model = engine.model
    if card.weights is None or not isinstance(model, WanModel):
        return None
    # Other libraries and devices give other last bits.
    encoder = weights.text_fingerprint(
        card.weights.files,
        dtype=card.dtype,
        slots=card.max_prompt_tokens,
        device=torch.cuda.get_device_name(device) if device.startswith("cuda") else f"cpu {torch.get_num_threads()}",
        torch=torch.__version__,
        transformers=transformers.__version__,
    )
    texts = Texts(model, store, encoder)
    engine.use_features(texts.features)
    return texts


def generation_settings(domain: DomainRecord, fps: int) -> GenerationSettings:
    """The settings of a domain's jobs, as the engine takes them."""
    return GenerationSettings(
        width=domain.width,
        height=domain.height,
        frames=domain.frames,
        fps=fps,
        steps=domain.steps,
        guidance_scale=domain.guidance_scale,
        shift=domain.shift,
        scheduler=domain.scheduler,
        step_cache=domain.step_cache,
    )


def token_grid(card: ModelCard, domain: DomainRecord) -> tuple[int, int, int] | None:
    """The token grid [T, h, w] of a domain's videos, without its model; None if the card doesn't tell.

    The same as `Engine.grid`.
    """
    if card.weights is None:
        from chorus_batch.chorus.tiny.codec import PATCH

        spatial, patch = PATCH, (1, 2, 2)
    elif card.anatomy is not None:
        spatial, patch = memory.SPATIAL, card.anatomy.patch
    else:
        return None
    latents = (domain.frames - 1) // memory.TEMPORAL + 1
    return latents // patch[0], domain.height // spatial // patch[1], domain.width // spatial // patch[2]


def _turns(card: ModelCard, device: str, settings: Settings) -> bool:
    """Whether transformer and text encoder must take turns on the device, for videos of the card's own size."""
    if card.anatomy is None or not device.startswith("cuda"):
        return False
    import torch

    task = memory.Task.of(card.defaults, card.max_prompt_tokens)
    found = memory.arrangements(card.anatomy, task, card.dtype, auxiliaries(settings))
    total = torch.cuda.mem_get_info(device)[1]
    return memory.choose(found, total) in (memory.Verdict.offload, memory.Verdict.too_large)
