"""The segmenter that looks at the source's video: GroundingDINO finds the objects that the words name in key frames,
SAM 2 outlines them there and follows them through the frames between.

Source: Chorus (arXiv 2604.04451), SRD: key frames alone are searched, and masks are propagated inside a temporal group
of the codec; a group's key frame is its first. Both models are transformers' own classes: they need no operators of
their own, and of the extra `segment` only what prepares GroundingDINO's pictures: without torchvision Pillow does.
"""

from __future__ import annotations

import json
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from . import wan
from .differ import Difference, Scope
from .errors import WeightsError
from .regions import GROUP, complement, pool
from .segment import EvidenceSegmenter, Segmenter, Source

log = logging.getLogger(__name__)

DINO, SAM2 = "grounding-dino", "sam2_video"  # `model_type` in a folder's config.json
# Of a box's score, from 0 to 1: between the 0.25 and 0.35 that the two releases of GroundingDINO advise.
THRESHOLD = 0.3
MOST = 8  # boxes of a key frame, the best: SAM 2 follows each on its own
AT_ONCE = 4  # key frames that GroundingDINO sees in one pass
# SAM 2 was trained on pictures scaled by ImageNet's mean and deviation.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# How SAM 2's prompt encoder knows the two corners of a box from clicks.
CORNERS = (2, 3)
# What a region depends on beside the weights: to be raised with whatever changes how they are used.
VERSION = f"grounded/1 {THRESHOLD} {MOST}"
HINT = "name two folders that transformers can load: CHORUS_SEGMENTER=grounded:<GroundingDINO>,<SAM 2 for video>"


class GroundedSegmenter:
    """Regions from GroundingDINO and SAM 2. Where a source's video isn't at hand, the `fallback` looks instead.

    The same video and words give the same region.
    """

    def __init__(
        self,
        dino: Path,
        sam2: Path,
        device: str = "cpu",
        threshold: float = THRESHOLD,
        fallback: Segmenter | None = None,
    ) -> None:
        """Loads nothing yet. Raises WeightsError for a folder that is missing or holds something else."""
        for folder, wanted in ((dino, DINO), (sam2, SAM2)):
            _check(folder, wanted)
        self._folders, self._device, self._threshold = (dino, sam2), device, threshold
        self._fallback = fallback or EvidenceSegmenter()
        self._loaded: tuple[Any, Any, Any] | None = None  # GroundingDINO, its processor, SAM 2

    def region(self, source: Source, difference: Difference) -> torch.Tensor | None:
        """M_base, bool [T, h, w], or None where no object of the words is found. Raises WeightsError and RegionError.

        In a group in whose key frame nothing is found it's what the nearest group with a find has: an object seldom
        leaves for a moment, and a hole in the region would leave the old one in the picture.
        """
        if not has_place(difference):
            return None
        video = source.video() if source.video is not None else None
        if video is None:
            return self._fallback.region(source, difference)
        frames, (_, rows, columns) = video.frames, video.grid
        boxes = self._boxes(frames[_keys(len(frames))], phrases(source.prompt, difference))
        found = [group for group, each in enumerate(boxes) if len(each)]
        if not found:
            return None
        mask = torch.zeros(frames.shape[:3], dtype=torch.bool)
        for group in found:
            part = _group(group)
            mask[part] = self._outlines(frames[part], boxes[group])
        region = pool(mask, (frames.shape[1] // rows, frames.shape[2] // columns))
        for group in set(range(len(boxes))).difference(found):
            region[group] = region[min(found, key=lambda other: abs(other - group))]
        # Where the background differs the words name what stays.
        return complement(region) if difference.scope is Scope.background else region

    def _boxes(self, pictures: npt.NDArray[np.uint8], text: str) -> list[torch.Tensor]:
        """Boxes [n, 4] of each picture [H, W, 3], the best first: left, top, right and bottom in pixels."""
        model, processor, _ = self._models()
        size = pictures.shape[1:3]
        found: list[torch.Tensor] = []
        for first in range(0, len(pictures), AT_ONCE):
            some = list(pictures[first : first + AT_ONCE])
            given = processor(images=some, text=[text] * len(some), return_tensors="pt").to(self._device)
            with torch.inference_mode():
                told = model(**given)
            told = processor.post_process_grounded_object_detection(
                told, given["input_ids"], threshold=self._threshold, target_sizes=[size] * len(some)
            )
            found += [each["boxes"][each["scores"].argsort(descending=True, stable=True)[:MOST]].cpu() for each in told]
        limits = torch.tensor([size[1], size[0]] * 2)
        return [boxes.clamp_min(0).minimum(limits) for boxes in found]

    def _outlines(self, frames: npt.NDArray[np.uint8], boxes: torch.Tensor) -> torch.Tensor:
        """The pixels, bool [F, H, W], of all objects that stand in `boxes` [n, 4] in the first frame [H, W, 3]."""
        from transformers.models.sam2_video.modeling_sam2_video import Sam2VideoInferenceSession

        _, _, model = self._models()
        side = model.config.image_size
        inside = (side, side) if isinstance(side, int) else tuple(side)
        pixels = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float() / 255
        pixels = torch.nn.functional.interpolate(pixels, inside, mode="bilinear", antialias=True)
        mean, deviation = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, DEVIATION))
        height, width = frames.shape[1:3]
        device, pixels = self._device, (pixels - mean) / deviation
        session = Sam2VideoInferenceSession(pixels, height, width, device, device, "cpu", torch.float32)
        corners = boxes.reshape(-1, 1, 1, 2, 2) * torch.tensor([inside[1] / width, inside[0] / height])
        for number, points in enumerate(corners):
            labels = torch.tensor(CORNERS, dtype=torch.int32).reshape(1, 1, 2)
            index = session.obj_id_to_idx(number)
            session.add_point_inputs(index, 0, {"point_coords": points, "point_labels": labels})
        session.obj_with_new_inputs = list(range(len(corners)))
        outlines = torch.zeros(frames.shape[:3], dtype=torch.bool)
        for told in model.propagate_in_video_iterator(session, start_frame_idx=0):
            logits = torch.nn.functional.interpolate(told.pred_masks.float(), (height, width), mode="bilinear")
            outlines[told.frame_idx] = (logits > 0).any(0)[0].cpu()
        return outlines

    def _models(self) -> tuple[Any, Any, Any]:
        if self._loaded is None:
            from transformers import GroundingDinoForObjectDetection, Sam2VideoModel

            dino, sam2 = self._folders
            processor = wan.guarded(lambda: _processor(dino), f"the processor in {dino}")
            loaded = [_load(of, at) for of, at in ((GroundingDinoForObjectDetection, dino), (Sam2VideoModel, sam2))]
            finder, follower = (model.to(self._device).eval().requires_grad_(False) for model in loaded)
            self._loaded = finder, processor, follower
        return self._loaded


def has_place(difference: Difference) -> bool:
    """Whether there is anything to look for: else there's no region, whatever the video shows."""
    return difference.scope is not Scope.everything and bool(difference.source_spans)


def phrases(prompt: str, difference: Difference) -> str:
    """What GroundingDINO is asked for: the source's phrases, in small letters, a full stop behind each."""
    return " ".join(f"{' '.join(prompt[a:b].lower().split())}." for a, b in difference.source_spans)


def _keys(frames: int) -> list[int]:
    """The first frame of each temporal group."""
    return [0, *range(1, frames, GROUP)]


def _group(number: int) -> slice:
    """The frames of a temporal group: the first stands alone."""
    return slice(0, 1) if number == 0 else slice(1 + GROUP * (number - 1), 1 + GROUP * number)


def _check(folder: Path, wanted: str) -> None:
    try:
        named = json.loads((folder / "config.json").read_text("utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise WeightsError(f"{folder} holds no model of the type {wanted}: {error}", hint=HINT) from error
    if named != wanted:
        raise WeightsError(f"{folder} holds a model of the type {named}, not {wanted}", hint=HINT)


def _processor(folder: Path) -> Any:
    """GroundingDINO's, which prepares pictures by torchvision where that is installed, else by Pillow."""
    import transformers

    library: Any = transformers  # carries no types
    backend = "torchvision" if find_spec("torchvision") is not None else "pil"
    log.info("GroundingDINO's pictures are prepared by %s", backend)
    pictures = library.AutoImageProcessor.from_pretrained(folder, backend=backend, local_files_only=True)
    tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return library.GroundingDinoProcessor(pictures, tokenizer)


def _load(of: Any, folder: Path) -> Any:
    """A model in float32, from safetensors only, nothing fetched. What a file lacks would be filled at random."""

    def load() -> Any:
        model, found = of.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
        if found["missing_keys"]:
            raise ValueError(f"it lacks {len(found['missing_keys'])} weights, {min(found['missing_keys'])} among them")
        return model

    return wan.guarded(load, f"the model in {folder}")
