"""Seal the built-in model's weights: `python -m chorus_batch.chorus.tiny.seal [FOLDER]`, after they changed on purpose.

Writes the list of checksums that loading verifies against, and prints the fingerprints that the model cards must name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..fingerprint import CHECKSUMS, file_checksums
from .model import WEIGHTS, fingerprint, model_names


def seal(folder: Path = WEIGHTS) -> dict[str, str]:
    """Write the folder's list of checksums; returns the fingerprint of each model in it."""
    listed = json.dumps(file_checksums(folder), indent=2, sort_keys=True)
    (folder / CHECKSUMS).write_text(listed + "\n", "utf-8")
    return {name: fingerprint(folder, name) for name in model_names(folder)}


if __name__ == "__main__":
    for name, value in seal(*map(Path, sys.argv[1:2])).items():
        print(name, value)
