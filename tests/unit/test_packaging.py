"""What the extras promise: versions that fit together."""

from __future__ import annotations

import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]


def pinned(requirements: list[str], name: str) -> tuple[int, ...]:
    (version,) = [each.removeprefix(f"{name}==") for each in requirements if each.startswith(f"{name}==")]
    return tuple(map(int, version.split(".")))


def test_segment_brings_the_torchvision_of_the_pinned_torch() -> None:
    """torchvision 0.n belongs to torch 2.(n - 15), patch by patch."""
    major, minor, patch = pinned(PROJECT["dependencies"], "torch")
    assert pinned(PROJECT["optional-dependencies"]["segment"], "torchvision") == (0, minor + 15, patch)
    assert major == 2
