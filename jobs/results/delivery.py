"""A batch's results as a folder: files under readable names, a sidecar for each if wanted, and one manifest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from chorus_batch.jobs.results.download import download, prepare_folder, save_manifest
from chorus_batch.jobs.results.manifest import manifest_row
from chorus_batch.jobs.results.names import output_names
from chorus_batch.jobs.results.sheet import contact_sheet
from chorus_batch.jobs.storage import ObjectStore, StoredObject

SUFFIXES = {"video": ".mp4", "latents": ".safetensors", "sidecar": ".json"}


@dataclass(frozen=True)
class Delivering:
    """What is to be delivered, and where."""

    folder: Path
    what: tuple[str, ...] = ("video",)
    manifest: str = "jsonl"  # or csv
    name_template: str = "{id}-{slug}"
    presign: int | None = None  # seconds: links instead of files


@dataclass(frozen=True)
class Delivered:
    """What was: files in the folder, how many had to be fetched, and what the store has lost."""

    files: int
    fetched: int
    manifest: Path
    lost: tuple[str, ...]


def deliver(store: ObjectStore, rows: Sequence[Mapping[str, Any]], order: Delivering) -> Delivered:
    """Deliver a batch's jobs (rows of `statistics.jobs`, all of them, whatever their state).

    Raises UsageError if the folder can't be written or the template can't be used, StorageError if the store is away.
    """
    prepare_folder(order.folder)
    names = list(output_names(rows, order.name_template))
    lines = [_line(row) for row in rows]
    files = fetched = 0
    lost = []
    for kind in ("video", "latents"):
        if kind not in order.what:
            continue
        there = [n for n, row in enumerate(rows) if row[f"{kind}_key"] is not None]
        objects = [_stored(rows[n], kind) for n in there]
        field = "file" if kind == "video" else "latents_file"
        if order.presign is not None:
            for n, stored in zip(there, objects, strict=True):
                lines[n][field] = store.presign(stored.key, order.presign)
            continue
        wanted = [(stored, _named(names[n], kind)) for n, stored in zip(there, objects, strict=True)]
        for n, delivery in zip(there, download(store, wanted, order.folder), strict=True):
            if delivery.error is not None:
                lost.append(f"{rows[n]['id']}: {delivery.error}")
                continue
            lines[n][field] = delivery.name
            files += 1
            fetched += delivery.fetched
    if "sidecar" in order.what:
        for name, line in zip(names, lines, strict=True):
            path = order.folder / _named(name, "sidecar")
            path.write_text(json.dumps(manifest_row(line), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    if "sheet" in order.what:
        contact_sheet(_captioned(rows, lines, order.folder), order.folder / "contact_sheet.png")
    path = order.folder / f"manifest.{order.manifest}"
    save_manifest(lines, path, cast("Literal['jsonl', 'csv']", order.manifest))
    return Delivered(files, fetched, path, tuple(lost))


def _captioned(
    rows: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]], folder: Path
) -> Iterator[tuple[Path, str]]:
    for row, line in zip(rows, lines, strict=True):
        if line["file"] is not None and (folder / line["file"]).exists():
            reused = {"semantic": f" [reused {row['similarity'] or 0:.2f}]", "exact": " [linked]"}
            yield folder / line["file"], row["prompt"] + reused.get(row["cache_result"], "")


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    source = row["origin_job_id"] if row["cache_result"] == "exact" else row["source"]
    return {**row, "sha256": row["video_sha256"], "bytes": row["video_bytes"], "source": source, "file": None}


def _stored(row: Mapping[str, Any], kind: str) -> StoredObject:
    return StoredObject(row[f"{kind}_key"], row[f"{kind}_bytes"], row[f"{kind}_sha256"])


def _named(video_name: str, kind: str) -> str:
    return Path(video_name).stem + SUFFIXES[kind] if kind != "video" else video_name
