"""Whether each Triton program is faster than its torch reference: one that isn't has no place.

    python -m tests.bench.kernels [--smoke]

bfloat16 at the shapes of Wan2.1 1.3B and 14B, with 8,190 and 32,760 tokens and 512 text slots. Each program is first
held to its reference, then both are timed by CUDA events, median, with a cold cache. A program stays if it's faster at
every shape. Without a GPU nothing is decided; --smoke walks the same path on the CPU, interpreted, at tiny shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec

import torch

from chorus_batch.kernels.gain import key_gain
from chorus_batch.kernels.modulate import modulate
from chorus_batch.kernels.rope import rope

Operation = Callable[[bool], torch.Tensor]
DIM = 128  # channels of a head
SIZES = [(name, heads, tokens) for name, heads in (("1.3B", 12), ("14B", 40)) for tokens in (8190, 32760)]
SMOKE = [("smoke", 3, 5)]


@dataclass(frozen=True)
class Row:
    kernel: str
    model: str
    tokens: int
    reference_ms: float
    kernel_ms: float


def operations(heads: int, tokens: int, slots: int, device: str) -> Iterator[tuple[str, Operation]]:
    """Each operation on random inputs; its argument says whether the program computes it."""

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    query, angles = random(1, tokens, heads, DIM), random(1, tokens, 1, DIM, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    yield "rope", lambda triton: rope(query, cos, sin, triton=triton)
    hidden, (scale, shift) = query.flatten(2), random(2, 1, 1, heads * DIM, dtype=torch.float32)
    yield "modulate", lambda triton: modulate(hidden, scale, shift, 1e-6, triton=triton)
    keys = random(1, slots, heads * DIM)
    yield "key_gain", lambda triton: key_gain(keys, (3, 4), 1.3, triton=triton)


def median_ms(call: Callable[[], torch.Tensor], device: str) -> float:
    if device == "cuda":
        from triton.testing import do_bench

        return float(do_bench(call, return_mode="median"))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1000


def measure(device: str, smoke: bool) -> list[Row]:
    rows = []
    print(f"{'kernel':<10} {'model':<6} {'tokens':>6} {'reference ms':>13} {'kernel ms':>10} {'ratio':>6}")
    for model, heads, tokens in SMOKE if smoke else SIZES:
        for name, operation in operations(heads, tokens, 7 if smoke else 512, device):
            # One unit in the last place of bfloat16.
            torch.testing.assert_close(operation(True), operation(False), rtol=2**-7, atol=1e-4)
            reference, kernel = (median_ms(partial(operation, triton), device) for triton in (False, True))
            print(f"{name:<10} {model:<6} {tokens:>6} {reference:>13.4f} {kernel:>10.4f} {reference / kernel:>6.2f}")
            rows.append(Row(name, model, tokens, reference, kernel))
    return rows


def verdicts(rows: list[Row]) -> dict[str, str]:
    slower = {row.kernel for row in rows if row.kernel_ms >= row.reference_ms}
    return {row.kernel: "goes" if row.kernel in slower else "stays" for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU, interpreted; decides nothing")
    smoke = parser.parse_args().smoke
    device = "cuda" if torch.cuda.is_available() and not smoke else "cpu"
    if smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton's first import
    missing = "triton" if find_spec("triton") is None else "" if smoke or device == "cuda" else "a CUDA device"
    torch.manual_seed(0)
    with torch.inference_mode():
        rows = [] if missing else measure(device, smoke)
    decided = verdicts(rows) if device == "cuda" else {}
    for name, verdict in decided.items():
        print(f"{name} {verdict}")
    if not decided:
        print(f"nothing is decided: {f'{missing} is missing' if missing else 'an interpreter has no speed'}")
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(
        json.dumps(
            {"device": name, "torch": torch.__version__, "verdicts": decided, "rows": [asdict(row) for row in rows]}
        )
    )


if __name__ == "__main__":
    main()
