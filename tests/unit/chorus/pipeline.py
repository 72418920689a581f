"""diffusers' own WanPipeline on given text features: what this project's loop is held to."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.pipelines.wan.pipeline_wan import WanPipeline

from chorus_batch.chorus.denoise import Guidance


def wan_pipeline(transformer: Any, scheduler: Any) -> Any:
    pipeline = WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, transformer=transformer)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def latents_of(pipeline: Any, noise: torch.Tensor, guidance: Guidance, steps: int) -> torch.Tensor:
    """x[steps] [1, C, T, H, W] of a video of 64x64 and 9 frames."""
    latents: torch.Tensor = pipeline(
        prompt_embeds=guidance.conditional,
        negative_prompt_embeds=guidance.unconditional,
        latents=noise,
        height=64,
        width=64,
        num_frames=9,
        num_inference_steps=steps,
        guidance_scale=guidance.scale,
        output_type="latent",
    ).frames
    return latents
