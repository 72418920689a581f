"""The models beside the video model, which find how prompts differ and where, and the room that they take.

They work between two jobs' denoising, one after the other, and stay on the device. What they hold while they work, in
bytes beside their weights:

- *GroundingDINO* (float32), for each picture and each token of its encoder (steps of 8, 16, 32 and 64 pixels in the
  largest picture that its processor makes): what deformable attention samples, 14 levels points d + 8000, or its
  feed-forward layer, 8 ffn + 48 d.
- *SAM 2* (float32), for each pixel of its own side squared: 5 for each value of its first stage's width, and 25 for
  each object.
- *a language model* (the files' dtype), for each token of the questions that are asked at once: keys and values of all
  layers, and 3 values of its feed-forward layer.

The factors of the first two are those of the live tensors of the real classes (a test counts GroundingDINO's), rounded
up; the third's are its shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from chorus_batch.jobs import weights
from chorus_batch.jobs.anatomy import count_values
from chorus_batch.jobs.errors import WeightsRejected
from chorus_batch.jobs.memory import Auxiliaries
from chorus_batch.jobs.settings import Settings

# As the engine has them: pictures and objects at a time, questions at a time, tokens of each with its answer.
PICTURES, OBJECTS, QUESTIONS, TOKENS = 4, 8, 16, 1024
STRIDES = (8, 16, 32, 64)
LARGEST = (800, 1333)  # GroundingDINO's own processor: the shorter and the longer side


def auxiliaries(settings: Settings) -> Auxiliaries:
    """Those that the settings name. Where their files are missing or of another form they're unknown, no error."""
    named: dict[str, Callable[[], tuple[int, int]]] = {}
    if settings.segmenter_folders is not None:
        named["segmenter"] = partial(_segmenter, *settings.segmenter_folders)
    if settings.differ_folder is not None:
        named["differ"] = partial(_differ, settings.differ_folder)
    kept: dict[str, int] = {}
    unknown: list[str] = []
    most = 0
    for name, measure in named.items():
        try:
            kept[name], work = measure()
        except (WeightsRejected, OSError, ValueError, LookupError, TypeError, ZeroDivisionError):
            unknown.append(name)
        else:
            most = max(most, work)
    return Auxiliaries(kept, most, tuple(unknown))


def _segmenter(dino: Path, sam2: Path) -> tuple[int, int]:
    """Bytes of its weights, and of what it holds at work."""
    return 4 * (_values(dino) + _values(sam2)), max(_finding(dino), _following(sam2))


def _differ(folder: Path) -> tuple[int, int]:
    size = sum(path.stat().st_size for path in _files(folder))
    return size, _answering(weights.read_json(folder / "config.json"), size / _values(folder))


def finding(config: Mapping[str, Any], height: int, width: int) -> int:
    """Bytes that GroundingDINO holds for one picture beside its weights."""
    tokens = sum(-(-height // stride) * -(-width // stride) for stride in STRIDES)
    d = int(config.get("d_model", 256))
    points = int(config.get("num_feature_levels", 4)) * int(config.get("encoder_n_points", 4))
    return tokens * max(14 * points * d + 8000, 8 * int(config.get("encoder_ffn_dim", 2048)) + 48 * d)


def _finding(folder: Path) -> int:
    size = _processor(folder).get("size") or {}
    sides = int(size.get("shortest_edge", LARGEST[0])), int(size.get("longest_edge", LARGEST[1]))
    return PICTURES * finding(weights.read_json(folder / "config.json"), *sides)


def _following(folder: Path) -> int:
    config = weights.read_json(folder / "config.json")
    widths = config["vision_config"]["backbone_config"].get("embed_dim_per_stage", [96])
    side = config.get("image_size", 1024)
    height, width = (side, side) if isinstance(side, int) else side
    return int(height) * int(width) * (5 * int(widths[0]) + 25 * OBJECTS)


def _answering(config: Mapping[str, Any], size: float) -> int:
    heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
    kept = int(config.get("num_key_value_heads") or heads) * int(config.get("head_dim") or width // heads)
    values = 2 * int(config["num_hidden_layers"]) * kept + 3 * int(config["intermediate_size"]) + 6 * width
    return int(QUESTIONS * TOKENS * values * size)


def _processor(folder: Path) -> Mapping[str, Any]:
    own = folder / "preprocessor_config.json"
    if own.is_file():
        return weights.read_json(own)
    path = folder / "processor_config.json"
    return dict(weights.read_json(path).get("image_processor") or {}) if path.is_file() else {}


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise WeightsRejected(f"{folder} holds no .safetensors file", hint=weights.FETCH)
    return found


def _values(folder: Path) -> int:
    return count_values(_files(folder))
