"""Where a Wan model's weights lie, which files they are, and what identifies them. Plain files: no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chorus_batch.jobs import hub
from chorus_batch.jobs.checksums import combine
from chorus_batch.jobs.errors import WeightsRejected

FETCH = "fetch the model again, or correct its folder"
PIPELINE = "WanPipeline"
# Part of a pipeline's folder -> the class that its model_index.json must name.
PARTS: Mapping[str, str] = {
    "transformer": "WanTransformer3DModel",
    "text_encoder": "UMT5EncoderModel",
    "vae": "AutoencoderKLWan",
}
TOKENIZER = Path("tokenizer") / "tokenizer.json"


@dataclass(frozen=True)
class Weights:
    """As a model card names them.

    `folder` is a path, or a hub's `owner/name` with its `revision`. `checkpoint` takes the place of the folder's
    transformer; `lora` is added to it, times `lora_strength`. `files` holds every file's sha256 (hex), by name.
    """

    folder: str
    revision: str = ""
    checkpoint: str = ""
    lora: str = ""
    lora_strength: float = 1.0
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Located:
    """Weights on this host."""

    folder: Path
    checkpoint: Path | None
    lora: Path | None


def locate(weights: Weights, models: Path, *, fetch: bool = False) -> Located:
    """Where the weights are on this host: in the folder `models` by their last name, else where the card says.

    A hub's model that this host lacks is fetched if `fetch` says so. Raises WeightsRejected and DependencyDown.
    """
    folder = _here(weights.folder, models)
    if not folder.is_dir():
        if not hub.is_id(weights.folder):
            raise WeightsRejected(f"there is no folder {weights.folder}", hint="check where the model lies")
        folder = hub.snapshot(weights.folder, weights.revision or None, fetch=fetch)
    others = []
    for name in (weights.checkpoint, weights.lora):
        path = _here(name, models) if name else None
        if path is not None and not path.exists():
            raise WeightsRejected(f"{name} isn't there", hint="check where the file lies")
        others.append(path)
    return Located(folder, *others)


def files_of(located: Located) -> dict[str, Path]:
    """Every file that loading reads, by a name that is the same on every host. Raises WeightsRejected.

    Checked without reading weights: the classes are those of a Wan text-to-video pipeline, and each file is there and
    as long as it says.
    """
    folder = located.folder
    _check_index(folder)
    files: dict[str, Path] = {}
    for part in PARTS:
        files[f"{part}/config.json"] = _present(folder / part / "config.json")
        if part != "transformer" or located.checkpoint is None:
            files |= {f"{part}/{path.name}": path for path in _shards(folder / part)}
    _present(folder / TOKENIZER)
    files |= {f"tokenizer/{path.name}": path for path in sorted((folder / "tokenizer").iterdir()) if path.is_file()}
    if located.checkpoint is not None:
        checkpoint = located.checkpoint
        shards = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.glob("*.safetensors"))
        if not shards:
            raise WeightsRejected(f"there is no .safetensors file in {checkpoint}", hint=FETCH)
        files |= {f"checkpoint/{n}": path for n, path in enumerate(shards)}
    if located.lora is not None:
        files["lora"] = located.lora
    for name, path in files.items():
        if path.suffix == ".safetensors" or name.startswith(("checkpoint/", "lora")):
            _check_length(path)
    return files


def fingerprint(checksums: Mapping[str, str], lora_strength: float) -> str:
    """sha256 (hex) over the names and checksums of `files_of`, and the strength where there is a LoRA."""
    return combine({**checksums, "lora_strength": repr(float(lora_strength))} if "lora" in checksums else checksums)


def text_fingerprint(checksums: Mapping[str, str], **ways: object) -> str:
    """sha256 (hex) of what a text's features follow from: encoder, tokenizer, and the `ways` in which they are run."""
    mine = {name: value for name, value in checksums.items() if name.startswith(("text_encoder/", "tokenizer/"))}
    return combine({**mine, **{name: str(value) for name, value in ways.items()}})


def differing(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Names of files that are others than expected, missing or too many."""
    return sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises WeightsRejected."""
    try:
        value = json.loads(_present(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsRejected(f"{path} can't be read: {error}", hint=FETCH) from error
    if not isinstance(value, dict):
        raise WeightsRejected(f"{path} holds no JSON object", hint=FETCH)
    return value


def _here(name: str, models: Path) -> Path:
    given = Path(name).expanduser()
    mine = models / given.name
    return mine if mine.exists() else given


def _present(path: Path) -> Path:
    if not path.is_file():
        raise WeightsRejected(f"{path} is missing", hint=FETCH)
    return path


def _check_index(folder: Path) -> None:
    if not (folder / "model_index.json").is_file():
        raise WeightsRejected(
            f"{folder} is no model in diffusers' layout: it has no model_index.json",
            hint="give the folder that holds transformer, text_encoder, tokenizer and vae",
        )
    index = read_json(folder / "model_index.json")
    found = {"pipeline": index.get("_class_name"), **{part: _named(index.get(part)) for part in PARTS}}
    for what, wanted in {"pipeline": PIPELINE, **PARTS}.items():
        if found[what] != wanted:
            raise WeightsRejected(
                f"{folder / 'model_index.json'}: the {what} is of class {found[what]}, not {wanted}",
                hint="only Wan text-to-video models are run: Wan2.1-T2V 1.3B or 14B in diffusers' layout",
            )
    if _named(index.get("transformer_2")) is not None or index.get("expand_timesteps"):
        raise WeightsRejected(
            f"{folder} holds a Wan2.2, whose two transformers or times by token aren't supported",
            hint="use a Wan2.1-T2V 1.3B or 14B",
        )


def _named(entry: Any) -> Any:
    return entry[1] if isinstance(entry, list) and len(entry) == 2 else None


def _shards(part: Path) -> list[Path]:
    """The weight files of a part, with the lists that name them."""
    indexes = sorted(part.glob("*.safetensors.index.json"))
    named = {str(name) for index in indexes for name in dict(read_json(index).get("weight_map", {})).values()}
    there = sorted(part.glob("*.safetensors"))
    missing = sorted(named - {path.name for path in there})
    if missing:
        raise WeightsRejected(f"{part} lacks {len(missing)} of {len(named)} weight files: {missing[0]}", hint=FETCH)
    if not there:
        raise WeightsRejected(f"there is no .safetensors file in {part}", hint=FETCH)
    return [*indexes, *there]


def read_header(path: Path) -> tuple[int, list[Mapping[str, Any]]]:
    """Where the tensors of a .safetensors file begin (bytes), and what it says of each. Raises OSError, ValueError."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size) if size < 1 << 30 else b"")
    return 8 + size, [tensor for name, tensor in header.items() if name != "__metadata__"]


def _check_length(path: Path) -> None:
    """A .safetensors file's header says where its last tensor ends: an interrupted copy is found without reading it."""
    try:
        begin, tensors = read_header(path)
        whole = path.stat().st_size == begin + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise WeightsRejected(f"{path} is no .safetensors file", hint=FETCH) from error
    if not whole:
        raise WeightsRejected(f"{path} is cut short, or has too much", hint=FETCH)
