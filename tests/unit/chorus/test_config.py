from dataclasses import FrozenInstanceError, replace

import pytest

from chorus_batch.chorus.config import GenerationSettings
from chorus_batch.chorus.errors import UnsupportedSettings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("width", 0),
        ("steps", 0),
        ("fps", -1),
        ("frames", 8),
        ("frames", 0),
        ("guidance_scale", -0.1),
        ("guidance_scale", float("nan")),
        ("shift", 0.0),
        ("shift", float("inf")),
        ("scheduler", "ddim"),
    ],
)
def test_a_bad_value_is_refused_by_name(settings: GenerationSettings, name: str, value: object) -> None:
    with pytest.raises(UnsupportedSettings, match=name):
        replace(settings, **{name: value})


def test_settings_are_frozen(settings: GenerationSettings) -> None:
    with pytest.raises(FrozenInstanceError):
        settings.steps = 5  # type: ignore[misc]


@pytest.mark.parametrize(("scale", "guided"), [(0.0, False), (1.0, False), (1.01, True), (2.5, True)])
def test_guidance_begins_above_one(settings: GenerationSettings, scale: float, guided: bool) -> None:
    assert replace(settings, guidance_scale=scale).guided is guided
