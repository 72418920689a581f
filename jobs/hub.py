"""Models of the Hugging Face hub: from this host's own copy, and fetched where there is none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from chorus_batch.jobs.errors import DependencyDown, WeightsRejected

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# What is read of a model; repositories hold examples and other formats too.
WANTED = ("*.json", "*.safetensors", "tokenizer/*")


def is_id(name: str) -> bool:
    """Whether it can be the name of a model of the hub, `owner/name`."""
    return _ID.fullmatch(name) is not None


def snapshot(
    name: str,
    revision: str | None = None,
    *,
    fetch: bool,
    cache: Path | None = None,
    wanted: Sequence[str] = WANTED,
) -> Path:
    """The folder of a model's `wanted` files, named for its revision; `fetch` gets them where this host lacks them.

    `cache` is huggingface_hub's folder, its own default if left out. Raises WeightsRejected for a model that isn't
    there, and DependencyDown (hub_unreachable) where the hub can't be asked.
    """
    # Here: it takes a second.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    find = partial(snapshot_download, name, revision=revision, allow_patterns=list(wanted), cache_dir=cache)
    try:
        return Path(find(local_files_only=True))
    except LocalEntryNotFoundError as error:
        if not fetch:
            raise WeightsRejected(
                f"the model {name} ({revision or 'newest revision'}) isn't on this host",
                hint=f"run: hf download {name}{f' --revision {revision}' if revision else ''}",
            ) from error
    try:
        return Path(find())
    except (LocalEntryNotFoundError, OSError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 404):
            raise WeightsRejected(
                f"there is no folder {name}, and the hub has no such model that this account may read",
                hint="check the name; for a gated model, accept its terms and run: hf auth login",
            ) from error
        raise DependencyDown(
            f"there is no folder {name}, and the hub can't be reached to fetch the model of that name",
            hint="check the folder's name, the network and HF_HUB_OFFLINE; or copy the model here and give its folder",
            code="hub_unreachable",
        ) from error
