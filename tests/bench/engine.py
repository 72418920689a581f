"""The engine alone, on a CPU: gathered steps against their ideal, the loop against diffusers' own, storage, padding.

    uv run --extra dev python -m tests.bench.engine [--rounds 7] [--threads 1]

Ratios are of interleaved runs in one process: medians, with the least and the most beside. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_wan import WanPipeline

from chorus_batch.chorus.attention import Gain
from chorus_batch.chorus.config import GenerationSettings
from chorus_batch.chorus.cost import split_flops
from chorus_batch.chorus.denoise import Guidance, Walk, denoise
from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.latents import pack, unpack
from chorus_batch.chorus.network import Network
from chorus_batch.chorus.policy import Policy
from chorus_batch.chorus.request import Request, Reuse
from chorus_batch.chorus.schedule import make_scheduler, noise_levels
from chorus_batch.chorus.segment import EvidenceSegmenter
from chorus_batch.jobs.cards.card import load_card
from chorus_batch.workers.runtime import lexical_differ, reuse_policy

SHARES = (0.25, 0.38, 0.5, 0.75, 1.0)
GRID = (5, 20, 24)  # 2,400 tokens
PROMPT = "a red circle moves left over a black background"


def larger() -> Any:
    """Random weights of Wan's class, large enough for 2,400 tokens to be work."""
    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=64, in_channels=16, out_channels=16,
        text_dim=64, freq_dim=256, ffn_dim=1024, num_layers=3, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=64,
    ).eval()  # fmt: skip


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def ratios(work: Callable[[], Any], baseline: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Of seconds, in turns: first one leads, then the other."""
    found = []
    work(), baseline()  # warm
    for number in range(rounds):
        if number % 2:
            ours = seconds(work)
            theirs = seconds(baseline)
        else:
            theirs = seconds(baseline)
            ours = seconds(work)
        found.append(ours / theirs)
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def gathered(rounds: int) -> list[dict[str, Any]]:
    """A step at a visible share f against a whole one; ideal: attention * f^2 + the rest * f, counted from shapes."""
    network = Network(larger())
    latents = torch.randn(1, 16, GRID[0], 2 * GRID[1], 2 * GRID[2])
    text, whole = network.text(torch.randn(1, 32, 64)), network.visible(latents)
    tokens = GRID[0] * GRID[1] * GRID[2]
    quadratic, linear = split_flops(network.transformer.config, 32)

    def step(visible: Any) -> Callable[[], Any]:
        return lambda: network.velocity(latents, network.times(torch.tensor([500.0])), text, visible)

    rows = []
    for share in SHARES:
        see = torch.zeros(tokens, dtype=torch.bool)
        see[torch.randperm(tokens)[: round(share * tokens)]] = True
        seen = int(see.sum())
        ideal = (quadratic * seen**2 + linear * seen) / (quadratic * tokens**2 + linear * tokens)
        ratio = ratios(step(network.visible(latents, see.reshape(GRID))), step(whole), rounds)
        rows.append({"share": share, "ideal": ideal, **ratio, "over_ideal": ratio["median"] / ideal - 1})
    return rows


def loop_overhead(engine: Engine, rounds: int) -> dict[str, float]:
    """The plain loop against WanPipeline's own, on the built-in model at 20 steps: the cost of being able to reuse."""
    ours = engine.model.transformer
    theirs = type(ours).from_config(ours.config).eval()
    theirs.load_state_dict(ours.state_dict())
    pipeline = WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=make_scheduler("euler", 3.0), transformer=theirs
    )
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.randn(1, 16, 3, 16, 16)
    with torch.no_grad():
        guidance = Guidance(engine.model.encode(PROMPT), engine.model.encode(""), 2.5)

    def by_pipeline() -> None:
        pipeline(
            prompt_embeds=guidance.conditional, negative_prompt_embeds=guidance.unconditional, latents=noise,
            height=64, width=64, num_frames=9, num_inference_steps=20, guidance_scale=2.5, output_type="latent",
        )  # fmt: skip

    return ratios(
        lambda: denoise(engine.network, lambda: make_scheduler("euler", 3.0), noise, Walk(20, guidance)),
        by_pipeline,
        rounds,
    )


def storage(engine: Engine) -> list[dict[str, Any]]:
    """Bytes of an entry and the error of what comes back, relative to the latents' spread; 20 steps."""
    settings = GenerationSettings(64, 64, 9, 8, 20, 2.5, 3.0)
    request, every = Request(PROMPT, 5, settings, "domain"), frozenset(range(1, 21))
    card = load_card("builtin")
    differ = lexical_differ(card)
    kept = reuse_policy(card, Policy.chorus, differ, differ, EvidenceSegmenter()).kept_steps(settings)
    source = engine.generate(request, keep=every, evidence=True)
    some = {k: x for k, x in source.trajectory.items() if k in kept}
    baseline = len(pack(source.trajectory, {}))
    rows: list[dict[str, Any]] = []
    for dtype in ("float32", "float16", "bfloat16"):
        data = pack(some, {}, dtype, source.evidence)
        rows.append({"stored": dtype, "bytes": len(data), "of_every_step_float32": len(data) / baseline,
                     "error": _error(unpack(data).latents, some)})  # fmt: skip
    sigmas = noise_levels(20, 3.0)
    noise = torch.randn((1, 16, 3, 16, 16), generator=torch.Generator("cpu").manual_seed(5))[0]
    guessed = {k: (1 - sigmas[k]) * source.latents + sigmas[k] * noise for k in some}
    rows.append({"stored": "nothing: from x[N] and the seed's noise", "bytes": 0, "of_every_step_float32": 0.0,
                 "error": _error(guessed, some)})  # fmt: skip
    return rows


def _error(found: dict[int, torch.Tensor], true: dict[int, torch.Tensor]) -> float:
    return max(float((found[k] - true[k]).square().mean().sqrt() / true[k].std()) for k in true)


def padding(engine: Engine) -> list[dict[str, Any]]:
    """What padded text slots take of the attention, and what a gain of 2 does to the share of one word.

    Means over all heads, layers and steps of one run. `masked` is what it would be without the padding.
    """
    offsets = engine.model.token_offsets(PROMPT)
    used, word = len(offsets), [i for i, span in enumerate(offsets) if span == (2, 5)]  # "red"
    settings = GenerationSettings(64, 64, 9, 8, 20, 2.5, 3.0)
    rows = []
    for gain in (1.0, 2.0):
        seen: dict[str, list[torch.Tensor]] = {"padding": [], "word": [], "word_masked": []}

        def watch(layer: int, query: torch.Tensor, key: torch.Tensor, seen: Any = seen) -> None:
            scores = torch.einsum("bnhd,bshd->bhns", query, key) / query.shape[3] ** 0.5
            share, masked = scores.softmax(-1), scores[..., :used].softmax(-1)
            seen["padding"].append(share[..., used:].sum(-1).mean())
            seen["word"].append(share[..., word].sum(-1).mean())
            seen["word_masked"].append(masked[..., word].sum(-1).mean())

        class Watching:
            sum = None

            def at(self, step: int) -> Any:
                return watch

        guidance = Guidance(engine.model.encode(PROMPT), engine.model.encode(""), settings.guidance_scale)
        walk = Walk(20, guidance, gain=lambda k, gain=gain: Gain(word, gain, 1.0), recorder=Watching())  # type: ignore[arg-type,misc]
        denoise(engine.network, lambda: make_scheduler("euler", 3.0), torch.randn(1, 16, 3, 16, 16), walk)
        rows.append({"gain": gain, **{name: float(torch.stack(values).mean()) for name, values in seen.items()}})
    return rows


def hits(engine: Engine, rounds: int) -> dict[str, Any]:
    """Seconds of one hit of all stages against a plain generation of the same prompt, and the tokens computed."""
    settings = GenerationSettings(64, 64, 9, 8, 20, 2.5, 3.0)
    source = engine.generate(Request(PROMPT, 5, settings, "domain"), keep=frozenset(range(21)), evidence=True)
    request = Request(PROMPT.replace("red", "blue"), 6, settings, "domain")
    reuse = Reuse(1, "domain", 0.9, 10, 10, source.trajectory)
    hit = engine.generate(request, reuse)
    ratio = ratios(lambda: engine.generate(request, reuse), lambda: engine.generate(request), rounds)
    return {"k1": 10, "tokens": hit.trace.tokens_computed / hit.trace.tokens_total, **ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    engine = Engine.load(threads=arguments.threads)
    with torch.inference_mode():
        found = {
            "gathered step against a whole one": gathered(arguments.rounds),
            "plain loop against WanPipeline's": [loop_overhead(engine, arguments.rounds)],
            "storage of an entry": storage(engine),
            "padding's share of the attention": padding(engine),
        }
    found["a hit of stage 1 against a plain generation"] = [hits(engine, arguments.rounds)]
    for what, rows in found.items():
        print(f"\n{what}")
        for row in rows:
            print("  " + "  ".join(f"{n} {v:.4g}" if isinstance(v, float) else f"{n} {v}" for n, v in row.items()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
