"""Names of columns: what people call them, and what they mean here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from chorus_batch.jobs.errors import UsageError

EXTRA = "extra"  # what `--map theirs=extra` says: keep it with the row, don't read it

ALIASES: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "text", "caption", "prompt_en", "video_prompt", "positive_prompt", "positive"),
    "negative_prompt": ("negative_prompt", "negative", "neg"),
    "id": ("id", "external_id", "uuid", "custom_id", "client_id", "task_id", "job_id", "sample_id", "take_id"),
    "seed": ("seed", "base_seed", "se"),
    "width": ("width",),
    "height": ("height",),
    "size": ("size", "resolution", "video_size", "target_shape"),
    "aspect_ratio": ("aspect_ratio",),
    "frames": ("num_frames", "frames", "frame_num", "video_length", "target_video_length"),
    "duration": ("duration", "seconds", "duration_s", "duration_seconds"),
    "fps": ("fps", "force_fps", "target_fps"),
    "steps": ("num_inference_steps", "steps", "st", "infer_steps", "sample_steps"),
    "guidance_scale": ("guidance_scale", "guidance", "cfg", "cfg_scale", "sample_guide_scale"),
    "shift": ("flow_shift", "shift", "fs", "sample_shift"),
    "scheduler": ("scheduler", "sampler", "sample_solver", "sa"),
    "lora": ("lora", "loras", "lora_name", "lora_path"),
    "lora_strength": ("lora_strength",),
    "output_name": (
        *("output_name", "output_filename", "filename", "name", "output_prefix"),
        *("save_file", "save_result_path", "output_path"),
    ),
    "repeat": ("repeat", "repeat_generation", "n_samples"),
    "priority": ("priority",),
    "reuse": ("reuse", "cache"),
    "policy": ("policy",),
    "step_cache": ("step_cache",),
}


def squeezed(name: str) -> str:
    """A name without case, spaces, dashes and underscores."""
    return re.sub(r"[\s_\-\ufeff]+", "", name).casefold()


_MEANING = {squeezed(alias): column for column, aliases in ALIASES.items() for alias in aliases}


def meaning(name: str) -> str | None:
    """The canonical column that a name means by itself; None for an unknown one."""
    return _MEANING.get(squeezed(name))


class ColumnNames:
    """The aliases, and above them what the person said with `--map theirs=ours`.

    Raises UsageError for an `ours` that is no column.
    """

    def __init__(self, mapping: Mapping[str, str]) -> None:
        self._mapped: dict[str, str | None] = {}
        for theirs, ours in mapping.items():
            target = None if squeezed(ours) == EXTRA else meaning(ours)
            if target is None and squeezed(ours) != EXTRA:
                known = ", ".join([*ALIASES, EXTRA])
                raise UsageError(f"--map {theirs}={ours}: there is no column {ours!r}", hint=f"columns: {known}")
            self._mapped[squeezed(theirs)] = target
        targets = [target for target in self._mapped.values() if target]
        for target in targets:
            if targets.count(target) > 1:
                raise UsageError(f"--map gives two columns for {target!r}", hint="map one of them to extra")
        self._taken = set(targets)
        self._theirs = {squeezed(theirs): theirs for theirs in mapping}

    def resolve(self, name: str) -> str | None:
        """What a name means in this file; None: nothing, it goes to `extra`.

        Where the person mapped another column to the same meaning, the alias loses it.
        """
        key = squeezed(name)
        if key in self._mapped:
            return self._mapped[key]
        column = _MEANING.get(key)
        return None if column in self._taken else column

    def unmatched(self, header: Iterable[str]) -> list[str]:
        """The mapped names that a header doesn't have."""
        present = {squeezed(name) for name in header}
        return [theirs for key, theirs in self._theirs.items() if key not in present]
