"""Settings: where each value comes from, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from chorus_batch.jobs.errors import SettingsError
from chorus_batch.jobs.settings import Settings, child_environment, default_data_dir, load_settings


def load(tmp_path: Path, toml: str | None = None, **environ: str) -> Settings:
    if toml is not None:
        (tmp_path / "config.toml").write_text(toml)
    return load_settings({"CHORUS_DATA_DIR": str(tmp_path), **{f"CHORUS_{k.upper()}": v for k, v in environ.items()}})


def test_without_anything_the_defaults_hold(tmp_path: Path) -> None:
    assert load(tmp_path) == Settings(data_dir=tmp_path)


def test_the_environment_is_stronger_than_the_file_than_the_defaults(tmp_path: Path) -> None:
    found = load(tmp_path, 'model = "a"\nembedder = "clip"\nlease = 60\ns3_secure = true\n', model="b", threads="4")
    assert (found.model, found.embedder, found.lease, found.s3_secure) == ("b", "clip", 60.0, True)
    assert (found.threads, found.device) == (4, "auto")


def test_the_named_file_is_read_instead_of_the_folders(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('model = "other"\n')
    found = load(tmp_path, 'model = "a"\nthreads = 2\n', config=str(tmp_path / "other.toml"))
    assert (found.model, found.threads) == ("other", 1)


def test_the_option_is_stronger_than_the_variable(tmp_path: Path) -> None:
    environ = {"CHORUS_DATA_DIR": str(tmp_path / "a")}
    assert load_settings(environ, data_dir=tmp_path / "b").data_dir == tmp_path / "b"


def test_folders_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_settings({"CHORUS_DATA_DIR": "data"}).data_dir == tmp_path / "data"
    assert load_settings({"CHORUS_DATA_DIR": "~/data"}).data_dir == tmp_path / "data"
    assert load_settings({"CHORUS_DATA_DIR": ""}).data_dir == default_data_dir()


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("threads", "many", "a whole number"),
        ("threads", "1.5", "a whole number"),
        ("lease", "long", "a number"),
        ("s3_secure", "perhaps", "true or false"),
        ("exact_search_rows", "", "a whole number"),
    ],
)
def test_a_value_of_the_wrong_kind_names_its_variable(tmp_path: Path, name: str, value: str, kind: str) -> None:
    with pytest.raises(SettingsError, match=f"CHORUS_{name.upper()} is {value!r}") as caught:
        load(tmp_path, **{name: value})
    assert kind in caught.value.hint and caught.value.exit_code == 2
    with pytest.raises(SettingsError, match=rf"config\.toml: {name} is"):
        load(tmp_path, f'{name} = "{value}"\n')


@pytest.mark.parametrize("word", ["true", "True", "1"])
def test_yes(tmp_path: Path, word: str) -> None:
    assert load(tmp_path, s3_secure=word).s3_secure is True
    assert load(tmp_path, s3_secure={"true": "false", "True": "FALSE", "1": "0"}[word]).s3_secure is False


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"profile": "cloud"}, "cloud"),
        ({"lease": "5", "heartbeat_interval": "3"}, "lease"),
        ({"broker_url": "kafka://x"}, "broker_url"),
        ({"broker_url": "localhost:6379"}, "broker_url"),
        ({"min_similarity": "1.5"}, "min_similarity"),
        ({"min_similarity": "nan"}, "min_similarity"),
        ({"max_wait": "-1"}, "max_wait"),
        ({"max_wait": "inf"}, "max_wait"),
        ({"differ": "llm: "}, "differ"),
        ({"segmenter": "sam2"}, "segmenter"),
        ({"segmenter": "grounded:/dino"}, "segmenter"),
        ({"segmenter": "grounded:/dino, "}, "segmenter"),
        ({"segmenter": "evidence:/dino,/sam2"}, "segmenter"),
    ],
)
def test_values_that_make_no_sense(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        load(tmp_path, **changes)
    assert caught.value.hint


def test_a_file_with_unknown_settings(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="unknown setting 'modle'") as caught:
        load(tmp_path, 'modle = "a"\n')
    assert "model" in caught.value.hint
    with pytest.raises(SettingsError, match="data_dir"):
        load(tmp_path, 'data_dir = "/elsewhere"\n')


def test_a_file_that_is_no_toml_or_isnt_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"config\.toml: not valid TOML"):
        load(tmp_path, "model = \n")
    with pytest.raises(SettingsError, match=r"gone\.toml"):
        load(tmp_path, config=str(tmp_path / "gone.toml"))
    with pytest.raises(SettingsError, match=str(tmp_path)):
        load(tmp_path, config=str(tmp_path))


def test_a_child_finds_the_same_settings(tmp_path: Path) -> None:
    """Whatever a setting's type: a worker must not run with other values than the command that started it."""
    changed = {
        "profile": "production",
        "s3_secure": True,
        "lease": 12.5,
        "threads": 3,
        "model": "x",
        "data_dir": tmp_path,
    }
    settings = replace(Settings(), **changed)  # type: ignore[arg-type]
    assert load_settings(child_environment(settings)) == settings
    assert child_environment(settings)["PATH"] == os.environ["PATH"]
    assert all(f"CHORUS_{field.name.upper()}" in child_environment(settings) for field in fields(Settings))


def test_only_settings_reads_the_environment() -> None:
    """One place to look for what the program is told from outside."""
    root = Path(__file__).parents[3]
    readers = {
        path.relative_to(root).as_posix()
        for folder in ("jobs", "workers", "chorus", "kernels", "migrations")
        for path in (root / folder).rglob("*.py")
        if "os.environ" in (text := path.read_text()) or "getenv" in text
    }
    assert readers == {"jobs/settings.py"}


def test_settings_import_nothing_heavy() -> None:
    script = (
        "import sys, chorus_batch.jobs.settings; print({'torch', 'sqlalchemy', 'numpy', 'click'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
