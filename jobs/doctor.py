"""Checks of everything that a batch needs, each with what to do about it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from chorus_batch.jobs.devices import gpus
from chorus_batch.jobs.errors import ChorusBatchError, WeightsRejected
from chorus_batch.jobs.settings import Settings, visible_gpus

LEAST_FREE = 2 << 30  # bytes on the disk of the data folder


@dataclass(frozen=True)
class Finding:
    """One check: `ok` is None if it doesn't apply."""

    name: str
    ok: bool | None
    detail: str
    hint: str = ""


def examine(settings: Settings, ensure: Callable[[Settings], Settings]) -> Iterator[Finding]:
    """Run every check, the cheap ones first. A failed check doesn't stop the others."""
    yield Finding("python", sys.version_info >= (3, 11), sys.version.split()[0], "use Python 3.11 or newer")
    yield from _disk(settings)
    try:
        live = ensure(settings)
        yield Finding("servers", True, f"profile {settings.profile}, data in {settings.data_dir}")
    except ChorusBatchError as error:
        yield Finding("servers", False, str(error), error.hint)
        return
    for check in (_database, _broker, _store, _embedder, _model, _memory, _attention):
        try:
            yield check(live)
        except ChorusBatchError as error:
            yield Finding(check.__name__.strip("_"), False, str(error), error.hint)


def _disk(settings: Settings) -> Iterator[Finding]:
    folder = next((p for p in (settings.data_dir, *settings.data_dir.parents) if p.exists()), None)
    if folder is not None:
        free = shutil.disk_usage(folder).free
        yield Finding(
            "disk", free > LEAST_FREE, f"{free / 2**30:.1f} GiB free at {folder}", "make room, or move --data-dir"
        )


def _database(settings: Settings) -> Finding:
    from chorus_batch.jobs.database import check_versions, connect, ensure_schema

    engine = connect(settings.database_url)
    try:
        ensure_schema(engine)
        problems = check_versions(engine)
    finally:
        engine.dispose()
    return Finding("database", not problems, "; ".join(problems) or "schema and pgvector are current")


def _broker(settings: Settings) -> Finding:
    from celery import Celery
    from kombu.exceptions import OperationalError

    try:
        with Celery(broker=settings.broker_url).connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0.1, timeout=3)
            return Finding("broker", True, str(connection.transport_cls))
    except (OperationalError, OSError) as error:
        return Finding("broker", False, str(error), "check CHORUS_BROKER_URL; jobs run all the same, found by polling")


def _store(settings: Settings) -> Finding:
    from chorus_batch.jobs.storage import ObjectStore

    store = ObjectStore.from_settings(settings)
    store.ensure_bucket()
    took = store.probe()
    return Finding("store", True, f"{settings.s3_endpoint}: put {1000 * took.put:.0f} ms, get {1000 * took.get:.0f} ms")


def _embedder(settings: Settings) -> Finding:
    from chorus_batch.jobs.embed import make_embedder

    embedder = make_embedder(settings.embedder)
    vector = embedder.embed(["a red circle"])
    return Finding("embedder", vector.shape == (1, embedder.dimension), embedder.space)


def _model(settings: Settings) -> Finding:
    from chorus_batch.jobs import weights
    from chorus_batch.jobs.cards.card import load_card

    card = load_card(settings.model, settings.models_folder)
    if card.weights is not None:
        try:
            weights.files_of(weights.locate(card.weights, settings.models_folder))
        except WeightsRejected as error:
            # No fault of a host that submits batches and runs none.
            return Finding("model", None, f"{card.name} can't be run on this host: {error}", error.hint)
    return Finding("model", True, f"{card.name}, weights {card.fingerprint[:12]}")


def _memory(settings: Settings) -> Finding:
    """Whether the model, at its card's own size, has room on each GPU here."""
    from chorus_batch.jobs import memory
    from chorus_batch.jobs.auxiliary import auxiliaries
    from chorus_batch.jobs.cards.card import load_card

    card, devices = load_card(settings.model, settings.models_folder), gpus(visible_gpus())
    if card.anatomy is None:
        return Finding("memory", None if card.weights else True, f"{card.name}: " + (
            "added before sizes were counted" if card.weights else "fits any device"
        ))  # fmt: skip
    task = memory.Task.of(card.defaults, card.max_prompt_tokens)
    others = auxiliaries(settings)
    found = memory.arrangements(card.anatomy, task, card.dtype, others)
    line = memory.tell(found) + memory.tell_others(others)
    if not devices:
        return Finding("memory", None, f"no GPU is visible; {card.name} {line}")
    verdicts = [(gpu, memory.choose(found, gpu.memory)) for gpu in devices]
    told = "; ".join(f"{verdict} on GPU {gpu.index} ({gpu.name})" for gpu, verdict in verdicts)
    return Finding(
        "memory",
        any(verdict is not memory.Verdict.too_large for _, verdict in verdicts),
        f"{card.name} {line}: {told}",
        "use a GPU with more memory, or ask for smaller or shorter videos",
    )


def _attention(settings: Settings) -> Finding:
    found = importlib.util.find_spec("flash_attn") is not None
    return Finding("flash-attn", None if not found else True, "installed" if found else "not installed: SDPA is used")
