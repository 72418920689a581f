"""The memory plan: what it says of Wan2.1's sizes, and that no larger video or smaller card is ever better off."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus_batch.jobs import memory, registry
from chorus_batch.jobs.anatomy import Anatomy
from chorus_batch.jobs.cards.card import load_card
from chorus_batch.jobs.memory import GIB, Arrangement, Task, Verdict, arrangements, choose, needs_tiling, tell
from chorus_batch.jobs.registry import Asked
from chorus_batch.jobs.settings import Settings

# Wan2.1-T2V 1.3B and 14B, from their config.json and the sizes of their files.
SMALL = Anatomy(1_418_996_800, 5_680_910_336, 126_892_531, 30, 1536, 8960, (1, 2, 2), 64, 96)
LARGE = replace(SMALL, transformer=14_288_491_584, layers=40, width=5120, ffn_width=13824)
AT_480P = Task(832, 480, 81, 512)
ORDER = list(Verdict)

sizes = st.integers(1, 10**10)
small = st.integers(1, 10**4)
anatomies = st.builds(
    Anatomy, sizes, sizes, sizes, st.integers(1, 100), small, small, st.just((1, 2, 2)), st.integers(1, 128), small
)
tasks = st.builds(
    Task, st.integers(16, 4096), st.integers(16, 4096), st.integers(1, 500), st.integers(1, 1024), st.booleans()
)
dtypes = st.sampled_from(["bfloat16", "float32"])


def needs(found: tuple[Arrangement, ...]) -> list[int]:
    return [each.highest.total for each in found]


@given(anatomies, tasks, dtypes, st.data())
def test_nothing_larger_needs_less(anatomy: Anatomy, task: Task, dtype: str, data: st.DataObject) -> None:
    before = arrangements(anatomy, task, dtype)
    name = data.draw(st.sampled_from(["width", "height", "frames", "slots"]))
    larger: tuple[Anatomy, Task] = (anatomy, replace(task, **{name: getattr(task, name) + data.draw(small)}))
    if data.draw(st.booleans()):
        part = data.draw(st.sampled_from([n for n in Anatomy.__dataclass_fields__ if n != "patch"]))
        larger = replace(anatomy, **{part: getattr(anatomy, part) + data.draw(small)}), task
    after = arrangements(*larger, dtype)
    for less, more in zip(before, after, strict=True):
        for low, high in zip(less.peaks, more.peaks, strict=True):
            assert low.total <= high.total
    assert needs(arrangements(anatomy, task, "bfloat16")) <= needs(arrangements(anatomy, task, "float32"))


@given(anatomies, tasks, dtypes, sizes, sizes)
def test_more_memory_is_never_worse(anatomy: Anatomy, task: Task, dtype: str, memory: int, more: int) -> None:
    found = arrangements(anatomy, task, dtype)
    assert needs(found) == sorted(needs(found), reverse=True)
    assert ORDER.index(choose(found, memory + more)) <= ORDER.index(choose(found, memory))
    assert choose(found, needs(found)[0]) is Verdict.fits
    assert choose(found, needs(found)[-1] - 1) is Verdict.too_large


@pytest.mark.parametrize(
    ("anatomy", "task", "gib", "verdict"),
    [
        (SMALL, AT_480P, 80, Verdict.fits),
        (SMALL, AT_480P, 24, Verdict.tiling),
        (SMALL, AT_480P, 16, Verdict.offload),
        (SMALL, AT_480P, 6, Verdict.too_large),
        (LARGE, AT_480P, 80, Verdict.fits),
        (LARGE, AT_480P, 40, Verdict.offload),
        (LARGE, AT_480P, 24, Verdict.too_large),
        (LARGE, replace(AT_480P, width=1280, height=720), 80, Verdict.fits),
        (LARGE, replace(AT_480P, width=1280, height=720), 48, Verdict.offload),
    ],
)
def test_verdicts_for_wan(anatomy: Anatomy, task: Task, gib: int, verdict: Verdict) -> None:
    assert choose(arrangements(anatomy, task, "bfloat16"), gib * GIB) is verdict


def test_a_line_says_it_before_the_run() -> None:
    line = tell(arrangements(SMALL, AT_480P, "bfloat16"), 24 * GIB)
    assert line == (
        "needs about 25.0 GiB on the device (decoding beside denoising); with tiling 18.7; with offload 14.4:"
        " needs tiling in 24.0 GiB"
    )


def test_what_is_free_decides_on_tiles() -> None:
    whole = int(1.1 * (51 * 96 * 4 * 832 * 480 + 832 * 480 * 81 * 12))
    for gib, free, tiles in ((80, whole, False), (80, whole - 1, True), (24, 20 * GIB, True), (24, 0, True)):
        assert needs_tiling(SMALL, AT_480P, "bfloat16", gib * GIB, free) is tiles


def test_a_card_counts_its_parts(wan_folder: Path, tmp_path: Path, random_transformer: Any) -> None:
    import torch
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
    from transformers import UMT5EncoderModel

    settings = Settings(data_dir=tmp_path)
    card = registry.add(settings, Asked("tiny", str(wan_folder)))
    codec = AutoencoderKLWan.from_pretrained(wan_folder / "vae")
    text = UMT5EncoderModel.from_pretrained(wan_folder / "text_encoder")

    def count(module: torch.nn.Module) -> int:
        return sum(each.numel() for each in module.parameters())

    expected = Anatomy(count(random_transformer), count(text), count(codec), 2, 24, 32, (1, 2, 2), 4, 3)
    assert card.anatomy == expected == load_card("tiny", settings.models_folder).anatomy
    assert load_card("builtin").anatomy is None


def live_bytes(run: Callable[[], object]) -> int:
    """The most bytes of tensors that were alive at once while `run` made them."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Live(TorchDispatchMode):
        now = peak = 0

        def __init__(self) -> None:
            super().__init__()
            self.known: dict[int, int] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self.known:
                    storage = leaf.untyped_storage()
                    self.known[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self.ends, storage._cdata)
            return out

        def ends(self, name: int) -> None:
            self.now -= self.known.pop(name)

    import torch

    live = Live()
    with torch.inference_mode(), live:
        run()
    return live.peak


@pytest.mark.parametrize("tiling", [False, True])
def test_decoding_holds_what_is_said(tiling: bool) -> None:
    """The codec of Wan2.1, without weights or pixels: tensors that have shapes alone."""
    import torch
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

    with torch.device("meta"):
        codec = AutoencoderKLWan().eval()
    if tiling:
        codec.enable_tiling()
    # Two rows of three tiles.
    latents = torch.empty(1, 16, 3, 34, 60, device="meta")
    found = live_bytes(lambda: codec.decode(latents, return_dict=False))
    task = Task(480, 272, 9, 512)
    said = memory._tiled(SMALL, task) if tiling else memory._whole(SMALL, 480, 272, 9)
    assert found <= said <= 1.25 * found


@pytest.mark.parametrize(("dtype", "ffn"), [("bfloat16", 8960), ("bfloat16", 1536), ("float32", 8960)])
def test_denoising_holds_what_is_said(dtype: str, ffn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    from chorus_batch.chorus.network import Network

    # Of tensors without a device torch knows only the attention that builds its scores.
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda query, **_: torch.empty_like(query))
    with torch.device("meta"):
        kind = getattr(torch, dtype)
        transformer = WanTransformer3DModel(num_attention_heads=12, num_layers=2, ffn_dim=ffn).eval()
        for parameter in transformer.parameters():
            parameter.data = parameter.data.to(kind)
        transformer.rope.freqs_cos = transformer.rope.freqs_cos.to("meta")
        transformer.rope.freqs_sin = transformer.rope.freqs_sin.to("meta")
        network = Network(transformer)
        latents = torch.empty(1, 16, 21, 60, 104, dtype=kind)
        features = torch.empty(1, 512, 4096, dtype=kind)

    def step() -> None:
        text, visible = network.text(features), network.visible(latents)
        network.velocity(latents, network.times(torch.empty(1, device="meta")), text, visible)

    found = live_bytes(step)
    said = memory._denoising(replace(SMALL, ffn_width=ffn, layers=2), AT_480P, memory.BYTES[dtype])
    assert found <= said <= 1.1 * found
