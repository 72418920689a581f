"""Where everything is: the only reader of the environment.

Values come, strongest first, from `CHORUS_*` variables, from the TOML file named by `CHORUS_CONFIG` (or
`<data dir>/config.toml`), from what the local profile's servers wrote when they started, and from the defaults here.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import platformdirs

from chorus_batch.jobs.errors import SettingsError

Profile = Literal["local", "production"]

BROKERS = ("redis", "rediss", "redis+socket", "amqp", "amqps")


LATENT_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Settings:
    """Everything the program is told from outside. Addresses are empty until a profile fills them."""

    profile: Profile = "local"
    data_dir: Path = Path()
    # Addresses: in the local profile filled in by jobs.local, in production given by the person.
    database_url: str = ""  # postgresql://user:password@host:port/name (psycopg 3)
    broker_url: str = ""  # see BROKERS
    s3_endpoint: str = ""  # host:port
    s3_access_key: str = ""
    s3_secret_key: str = ""
    s3_bucket: str = "chorus-batch"
    s3_region: str = "us-east-1"
    s3_secure: bool = False  # https
    s3_timeout: float = 30.0  # seconds for one request
    # What is run.
    model: str = "builtin"
    models_dir: str = ""  # of added models' cards, and of weights that aren't where a card says; see models_folder
    embedder: str = "minilm"  # minilm | clip:<folder or hub id>
    device: str = "auto"  # auto | cpu | cuda
    threads: int = 1  # of torch on the CPU; several workers use several cores better than several threads do
    differ: str = "lexical"  # what tells how two prompts differ: lexical | llm:<folder of an instruct model>
    segmenter: str = "evidence"  # what finds where they differ: evidence | grounded:<GroundingDINO>,<SAM 2>
    attention_backend: str = ""  # of diffusers' dispatcher: native, flash, _flash_3, sage ...; empty: flash if it can
    compile: bool = False  # the blocks by torch.compile; needs a C++ compiler, on a GPU triton and gcc too
    # How workers behave; all in seconds.
    heartbeat_interval: float = 3.0
    lease: float = 30.0  # a worker silent for longer has lost its jobs
    poll_interval: float = 2.0  # how often an idle worker looks for work that no message announced
    max_wait: float = 3600.0  # a job that could be run for longer goes before what its worker holds in memory
    # Failure budgets of a job.
    max_failures: int = 3  # retryable errors
    max_deaths: int = 3  # times a worker died under it, then quarantine
    # The cache.
    min_similarity: float = 0.0  # 0: the model card's own threshold
    latent_dtype: str = "float16"  # of the latents in an entry: see LATENT_DTYPES; a video's own are float32
    exact_search_rows: int = 100_000  # above this many entries in a domain the approximate index is used

    def __post_init__(self) -> None:
        if self.profile not in get_args(Profile):
            raise SettingsError(f"profile is {self.profile!r}", hint="use local or production")
        scheme = self.broker_url.partition("://")[0]
        if self.broker_url and scheme not in BROKERS:
            # Not shown: it may hold a password.
            raise SettingsError(
                "broker_url is not the URL of a broker",
                hint=f"set CHORUS_BROKER_URL to one of {', '.join(f'{known}://' for known in BROKERS)}",
            )
        if self.differ != "lexical" and not (self.differ.startswith("llm:") and self.differ[4:].strip()):
            raise SettingsError(f"differ is {self.differ!r}", hint="use lexical or llm:<folder>")
        kind, _, folders = self.segmenter.partition(":")
        two = [name.strip() for name in folders.split(",")]
        if self.segmenter != "evidence" and not (kind == "grounded" and len(two) == 2 and all(two)):
            raise SettingsError(
                f"segmenter is {self.segmenter!r}",
                hint="use evidence or grounded:<folder of GroundingDINO>,<folder of SAM 2>",
            )
        if self.latent_dtype not in LATENT_DTYPES:
            raise SettingsError(f"latent_dtype is {self.latent_dtype!r}", hint=f"use {', '.join(LATENT_DTYPES)}")
        if self.lease < 2 * self.heartbeat_interval:
            raise SettingsError(
                f"lease ({self.lease} s) is shorter than two heartbeats ({self.heartbeat_interval} s each)",
                hint="raise CHORUS_LEASE or lower CHORUS_HEARTBEAT_INTERVAL",
            )
        if not 0.0 <= self.max_wait <= 1e9:
            raise SettingsError(f"max_wait is {self.max_wait}", hint="use a number of seconds from 0 to 1e9")
        if not 0.0 <= self.min_similarity <= 1.0:
            raise SettingsError(f"min_similarity is {self.min_similarity}", hint="use a cosine similarity from 0 to 1")

    @property
    def models_folder(self) -> Path:
        """Where the cards of added models are: `models_dir`, or `models` in the data folder."""
        return Path(self.models_dir).expanduser() if self.models_dir else self.data_dir / "models"

    @property
    def segmenter_folders(self) -> tuple[Path, Path] | None:
        """GroundingDINO's and SAM 2's; None where the segmenter has no models of its own."""
        if self.segmenter == "evidence":
            return None
        dino, sam2 = self.segmenter.removeprefix("grounded:").split(",")
        return Path(dino.strip()).expanduser(), Path(sam2.strip()).expanduser()

    @property
    def differ_folder(self) -> Path | None:
        """The language model's; None for the lexical differ."""
        return None if self.differ == "lexical" else Path(self.differ.removeprefix("llm:").strip()).expanduser()

    def with_addresses(self, **addresses: str) -> Settings:
        """These settings with server addresses filled in."""
        return replace(self, **addresses)  # type: ignore[arg-type]


def default_data_dir() -> Path:
    """The platform's user-data folder.

    For root this is `/var/lib/chorus-batch`: Postgres refuses to run as root, and the unprivileged user that it runs as
    can't reach a folder below root's home.
    """
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return Path("/var/lib/chorus-batch")
    return Path(platformdirs.user_data_dir("chorus-batch", appauthor=False))


def load_settings(environ: Mapping[str, str] | None = None, data_dir: Path | None = None) -> Settings:
    """Read the settings. `data_dir` (the command line's `--data-dir`) wins over `CHORUS_DATA_DIR`.

    Raises SettingsError, naming the variable or the file's key, for a value that can't be used.
    """
    environ = os.environ if environ is None else environ
    folder = data_dir or Path(environ.get("CHORUS_DATA_DIR") or default_data_dir())
    folder = folder.expanduser().absolute()
    named = environ.get("CHORUS_CONFIG")
    path = Path(named) if named else folder / "config.toml"
    values: dict[str, Any] = {}
    if path.exists() or named:
        values.update(_from_file(path))
    for field in fields(Settings):
        text = environ.get(f"CHORUS_{field.name.upper()}")
        if text is not None and field.name != "data_dir":
            values[field.name] = _parsed(field.name, text, f"CHORUS_{field.name.upper()}")
    return Settings(**{**values, "data_dir": folder})


def visible_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES as it is set, which says what a process of this one would see; None: every GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def child_environment(settings: Settings) -> dict[str, str]:
    """The environment in which a process started by this one finds the same settings."""
    told = {f"CHORUS_{f.name.upper()}": str(getattr(settings, f.name)) for f in fields(Settings)}
    return {**os.environ, **told}


def _from_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}", hint="check CHORUS_CONFIG") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from error
    known = {field.name for field in fields(Settings)} - {"data_dir"}
    for key in table:
        if key not in known:
            raise SettingsError(f"{path}: unknown setting {key!r}", hint=f"known settings: {', '.join(sorted(known))}")
    return {key: _parsed(key, str(value), f"{path}: {key}") for key, value in table.items()}


def _parsed(name: str, text: str, where: str) -> Any:
    default = getattr(Settings, name)
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return type(default)(text)
    except (ValueError, KeyError) as error:
        kind = {bool: "true or false", int: "a whole number", float: "a number"}.get(type(default), "text")
        raise SettingsError(f"{where} is {text!r}", hint=f"it must be {kind}") from error
