"""The scores that the model card gives, measured again: `python -m chorus_batch.chorus.tiny.scores [--write]`.

`scores.json` names each case and what the shipped weights reached in it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .checkpoint import load_transformer
from .decoder import load_codec
from .evaluate import Generator, Sampling, draw_questions, interval
from .features import BatchEncoder
from .model import WEIGHTS, described, transformer_folder

SCORES = Path(__file__).with_name("scores.json")


@dataclass(frozen=True)
class Case:
    """`count` questions of a suite, answered by a shipped model on a square canvas; `shares` of them right."""

    model: str
    suite: str
    count: int
    canvas: int
    steps: int
    guidance: float
    shift: float
    seed: int
    shares: Mapping[str, float]


def read_cases(path: Path) -> list[Case]:
    """The cases with their recorded shares."""
    return [Case(**case) for case in json.loads(path.read_text("utf-8"))]


def measure(case: Case) -> dict[str, float]:
    """The shares that the shipped weights reach now. Raises WeightsError."""
    generator = Generator(
        load_transformer(transformer_folder(WEIGHTS, case.model)),
        load_codec(WEIGHTS / "codec.safetensors", WEIGHTS / "decoder.safetensors"),
        BatchEncoder(slots=described(WEIGHTS)["text_slots"]),
    )
    sampling = Sampling(case.canvas, case.steps, case.guidance, case.shift, case.seed)
    return generator.evaluate(draw_questions(case.suite, case.count, case.seed), sampling).scores()


def main(arguments: list[str] | None = None) -> None:
    """The command: a JSON line for each case, the recorded share of "all" beside the measured ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, default=SCORES)
    parser.add_argument("--most", type=int, default=10**9, help="leave out cases with more questions")
    parser.add_argument("--write", action="store_true", help="record what is measured")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    done: list[dict[str, Any]] = []
    for case in read_cases(options.file):
        known = asdict(case)
        if case.count <= options.most:
            shares = measure(case)
            low, high = interval(shares["all"], case.count)
            line = known | {"shares": shares, "all_95": [round(low, 3), round(high, 3)]}
            print(json.dumps(line | {"recorded_all": case.shares.get("all")}), flush=True)
            known["shares"] = shares
        done.append(known)
    if options.write:
        options.file.write_text(json.dumps(done, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
