"""The one file that names diffusers' Wan classes: what they load, and what their weights are called."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights

# Straight from its module: the pipeline would import text encoders, image processors and more.
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors import SafetensorError
from safetensors.torch import load_file

from .errors import WeightsError
from .loading import LOADING

FETCH = "fetch the model again, or correct its folder"


def load_transformer(
    folder: Path, device: str, dtype: torch.dtype = torch.float32, checkpoint: Path | None = None
) -> Any:
    """A WanTransformer3DModel in evaluation mode from a folder in diffusers' layout.

    With `checkpoint`, a .safetensors file or a folder of them, the folder gives the configuration alone; the weights
    may have the names of Wan's own releases. What diffusers keeps in float32 is float32 whatever the dtype. Raises
    WeightsError unless every weight is there, and no other.
    """
    if checkpoint is None:
        model = load_component(WanTransformer3DModel, folder, dtype)
    else:
        model = guarded(lambda: _from_checkpoint(folder, checkpoint, dtype), f"the checkpoint {checkpoint}")
    return model.to(device).eval().requires_grad_(False)


def load_codec(folder: Path, device: str) -> Any:
    """An AutoencoderKLWan in evaluation mode, in float32, as diffusers advises. Raises WeightsError."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

    model = load_component(AutoencoderKLWan, folder, torch.float32)
    return model.to(device).eval().requires_grad_(False)


def load_component(of: Any, folder: Path, dtype: torch.dtype) -> Any:
    """A model of class `of` from its folder, from safetensors only, nothing fetched. Raises WeightsError.

    The libraries fill weights that a file lacks with random ones, and take a folder of another class: both are refused.
    """

    def load() -> Any:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        named = config.get("_class_name") or (config.get("architectures") or ["none"])[0]
        if named != of.__name__:
            raise ValueError(f"it holds a {named}, not a {of.__name__}")
        model, found = of.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
        _check_names(found["missing_keys"], found["unexpected_keys"])
        return model

    return guarded(load, f"the model in {folder}")


def guarded(load: Callable[[], Any], what: str) -> Any:
    """What `load` returns; a file that can't be read or used becomes a WeightsError. Running out of memory stays."""
    try:
        with LOADING:
            return load()
    except torch.OutOfMemoryError:
        raise  # a RuntimeError too
    except (OSError, ValueError, LookupError, RuntimeError, SafetensorError) as error:
        raise WeightsError(f"{what} can't be loaded: {error}", hint=FETCH) from error


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors file, or of all in a folder. Raises OSError, ValueError and SafetensorError."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ValueError("there is no .safetensors file in it")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    return tensors


def diffusers_names(names: Iterable[str]) -> dict[str, str]:
    """Names of weights in Wan's own releases -> what diffusers calls them."""
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    # It renames the keys of a state, in which it looks at nothing else; one at a time tells which became which.
    convert: Any = convert_wan_transformer_to_diffusers  # carries no types
    return {name: next(iter(convert({name: torch.empty(0)}))) for name in names}


def _from_checkpoint(folder: Path, checkpoint: Path, dtype: torch.dtype) -> Any:
    tensors = read_tensors(checkpoint)
    if "scale_shift_table" not in tensors:  # diffusers' own name for one that every transformer has
        tensors = {name: tensors.pop(old) for old, name in diffusers_names(list(tensors)).items()}
    with init_empty_weights(include_buffers=False):
        model = WanTransformer3DModel.from_config(WanTransformer3DModel.load_config(folder, local_files_only=True))
    wanted = model.state_dict()
    _check_names(wanted.keys() - tensors.keys(), tensors.keys() - wanted.keys())
    kept = set(model._keep_in_fp32_modules)
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(dtype if kept.isdisjoint(name.split(".")) else torch.float32)
    model.load_state_dict(tensors, assign=True)
    return model


def _check_names(missing: Iterable[str], unexpected: Iterable[str]) -> None:
    for what, names in (("lacks", sorted(missing)), ("has too much:", sorted(unexpected))):
        if names:
            raise ValueError(f"it {what} {len(names)} weights: {', '.join(names[:3])}{' ...' if names[3:] else ''}")
