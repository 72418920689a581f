"""Masks made ahead of use: by whom, for whom, and what a worker of theirs that dies costs."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.errors import WeightsError
from chorus_batch.chorus.grounded import GroundedSegmenter
from chorus_batch.jobs import cache, control, mask_work, queue, registry
from chorus_batch.jobs.cards.card import load_card
from chorus_batch.jobs.companion import worker_command, worker_environment
from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.dispatch import MAKE_MASKS, MASK_QUEUE, nudge_for_masks
from chorus_batch.jobs.models import CacheMode
from chorus_batch.jobs.outlook import Terms, of_batch
from chorus_batch.jobs.registry import Asked
from chorus_batch.jobs.settings import Settings
from chorus_batch.workers import publisher
from chorus_batch.workers.mask_maker import MaskMaker
from chorus_batch.workers.models import generation_settings, token_grid
from chorus_batch.workers.runtime import Runtime
from tests.faults.bench import Bench, Worker, hiring, until

Hire = Callable[..., Worker]

SIZE = {"width": "64", "height": "48", "frames": "9"}
SOURCE = "a red fox moves left over a gray background"
# Two of them ask for the same region of the source, one for another.
FOLLOWERS = (
    "a black fox moves left over a gray background",
    "a white fox moves left over a gray background",
    "a red fox moves left over a blue background",
)


@pytest.fixture
def wan(bench: Bench, wan_folder: Path, grounded_folders: tuple[Path, Path], tmp_path: Path) -> Bench:
    """The bench with a Wan of 4 steps, whose table has a second stage, and a segmenter with models of its own."""
    bench.settings = replace(
        bench.settings,
        model="tiny",
        models_dir=str(tmp_path / "models"),
        data_dir=tmp_path / "data",
        segmenter="grounded:{},{}".format(*grounded_folders),
    )
    registry.add(bench.settings, Asked("tiny", str(wan_folder), dtype="float32", distilled=True))
    return bench


@pytest.fixture
def hire(wan: Bench) -> Iterator[Hire]:
    with hiring(wan.settings) as hire:
        yield hire


@contextmanager
def maker(bench: Bench) -> Iterator[MaskMaker]:
    runtime = Runtime(bench.settings)
    yield MaskMaker(runtime)
    runtime.database.dispose()


@contextmanager
def without_segmenter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: object) -> None:
        raise WeightsError("the segmenter's models were loaded")

    with monkeypatch.context() as patch:
        patch.setattr(GroundedSegmenter, "_models", refuse)
        yield


def asked(bench: Bench, prompts: tuple[str, ...], **how: Any) -> int:
    return bench.submit(prompts, parameters=SIZE, **how)


def origins(bench: Bench, batch: int) -> list[str | None]:
    query = """
        SELECT g.details->>'mask' AS mask, (g.seconds->>'mask')::float8 AS seconds, g.notes FROM generations g
        JOIN jobs j ON j.id = g.job_id WHERE j.batch_id = :batch AND j.role = 'follower' ORDER BY j.id
    """
    rows = bench.sql(query, batch=batch)
    assert all((row.seconds is not None and row.seconds > 0) == (row.mask in ("store", "made")) for row in rows)
    return [row.mask for row in rows]


def regions(bench: Bench, batch: int) -> list[tuple[str | None, list[str]]]:
    """Of each follower: what its masks were, or why it has none."""
    query = """
        SELECT g.details->>'regions' AS regions, g.notes FROM generations g JOIN jobs j ON j.id = g.job_id
        WHERE j.batch_id = :batch AND j.role = 'follower' ORDER BY j.id
    """
    return [(row.regions, row.notes) for row in bench.sql(query, batch=batch)]


def test_masks_made_ahead_are_used_and_no_segmenter_is_loaded(
    wan: Bench, hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(wan, (SOURCE,))
    hire().work()
    batch = asked(wan, FOLLOWERS)
    videos, real = [], MaskMaker._video
    monkeypatch.setattr(MaskMaker, "_video", lambda *given: videos.append(given) or real(*given))
    with maker(wan) as masks:
        assert (masks.work(), len(videos)) == (2, 1)
        assert (masks.work(), len(videos)) == (0, 1)
    stored = wan.keys("masks/")
    (entry,) = wan.sql("SELECT sha256 FROM cache_entries")
    assert len(stored) == 2 and all(key.split("/")[2] == entry.sha256 for key in stored)
    with maker(wan) as another, without_segmenter(monkeypatch):
        assert (another.work(), len(videos)) == (0, 1)
    with without_segmenter(monkeypatch):
        hire().work()
    wan.check_done(batch)
    assert sorted(map(str, origins(wan, batch))) == ["None", "store", "store"]
    assert wan.keys("masks/") == stored
    # And what they are is what the denoising worker itself finds.
    wan.store.remove(stored)
    again = asked(wan, ("unlike anything else", *FOLLOWERS))  # other seeds: no exact hits
    hire().work()
    assert sorted(map(str, origins(wan, again))) == ["None", "made", "made"]
    assert regions(wan, again) == regions(wan, batch)
    assert wan.keys("masks/") == stored


def test_the_grid_is_the_engines(wan: Bench, hire: Hire) -> None:
    for settings, size in ((wan.settings, SIZE), (replace(wan.settings, model="builtin"), {})):
        wan.settings = settings
        wan.submit((SOURCE,), parameters=size)
        (newest,) = wan.sql("SELECT max(id) AS id FROM domains")
        with transaction(wan.engine) as connection:
            domain = cache.domain(connection, newest.id)
        engine: Engine = hire(model=settings.model).runtime.model(domain).engine
        shape = engine.model.latent_shape(generation_settings(domain, 8))
        card = load_card(domain.model, settings.models_folder)
        assert token_grid(card, domain) == engine.grid(shape)
        assert card.weights is None or token_grid(replace(card, anatomy=None), domain) is None


def test_an_estimate_tells_the_segmenters_room(wan: Bench) -> None:
    batch = asked(wan, (SOURCE,))
    for settings, told in ((wan.settings, True), (replace(wan.settings, segmenter="evidence"), False)):
        (line,) = of_batch(settings, wan.engine, batch, Terms()).memory
        assert ("; of it the segmenter" in line) is told


def test_a_source_rings_for_its_followers_masks_once(wan: Bench, hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    rung: list[Settings] = []
    monkeypatch.setattr(publisher, "nudge_for_masks", rung.append)
    batch = asked(wan, (SOURCE, *FOLLOWERS))
    hire().work()
    wan.check_done(batch)
    assert len(rung) == 1
    # The evidence's region is there in no time.
    asked(wan, ("the circle moves", "the red circle moves"))
    hire(segmenter="evidence").work()
    assert len(rung) == 1


def test_a_bell_that_nobody_answers_is_rung_once(wan: Bench) -> None:
    from celery import Celery

    with Celery(broker=wan.settings.broker_url).connection_for_write() as connection:
        waiting = connection.SimpleQueue(MASK_QUEUE)
        waiting.clear()
        assert all(nudge_for_masks(wan.settings) for _ in range(3))
        message = waiting.get(timeout=5)
        assert message.headers["task"] == MAKE_MASKS
        message.ack()
        with pytest.raises(waiting.Empty):
            waiting.get_nowait()
        waiting.close()
    assert not nudge_for_masks(replace(wan.settings, broker_url="amqp://127.0.0.1:9//"))


def test_only_what_may_be_claimed_and_reused_is_looked_at(wan: Bench, hire: Hire) -> None:
    def upcoming() -> list[str]:
        with transaction(wan.engine) as connection:
            found = mask_work.upcoming(connection, 100)
            assert mask_work.any_upcoming(connection) == bool(found)
        return [each.prompt for each in found]

    asked(wan, (SOURCE,))
    assert upcoming() == []
    hire().work()
    asked(wan, FOLLOWERS[:1], cache=CacheMode.exact)
    plain = wan.submit(FOLLOWERS[:1], parameters={**SIZE, "policy": "nirvana"})
    assert upcoming() == []
    batch = asked(wan, FOLLOWERS)
    assert sorted(upcoming()) == sorted(FOLLOWERS)
    control.pause(wan.engine, batch)
    assert upcoming() == []
    control.resume(wan.engine, batch)
    with transaction(wan.engine) as connection:
        worker = hire().id
        while (claim := queue.claim(connection, worker)) is not None:
            if claim.prompt == FOLLOWERS[0] and claim.batch_id == batch:
                break
    assert set(upcoming()) <= set(FOLLOWERS[1:]) and plain
    wan.sql("UPDATE cache_entries SET evicted_at = now(), evicted_reason = 'test'")
    assert upcoming() == []


def test_a_lost_video_is_no_fault_of_the_next_entry(wan: Bench, hire: Hire) -> None:
    others = ("the circle moves", "the red circle moves")
    first = asked(wan, (SOURCE, others[0]))
    hire().work()
    asked(wan, (FOLLOWERS[0], others[1]))
    wan.store.remove([wan.jobs(first)[0].video_key])
    with transaction(wan.engine) as connection:
        assert len({each.entry for each in mask_work.upcoming(connection, 9)}) == 2
    with maker(wan) as masks:
        made = masks.work()
    assert made == len(wan.keys("masks/"))
    assert not any(wan.jobs(first)[0].latents_sha256 in key for key in wan.keys("masks/"))


def test_a_killed_masks_worker_leaves_the_run_unharmed(
    wan: Bench, hire: Hire, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked(wan, (SOURCE,))
    hire().work()
    batch = asked(wan, FOLLOWERS)
    # No message tells of the work: it is found.
    log = tmp_path / "masks.log"
    with log.open("wb") as output:
        parent = subprocess.Popen(
            worker_command(name="masks", queue=MASK_QUEUE),
            env=worker_environment(wan.settings),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        until(lambda: wan.keys("masks/"), "a mask", 120)
        killed = child(parent.pid)
        os.kill(killed, signal.SIGKILL)
        # Whatever the killed one had made: the next child works out anew what there is to do.
        wan.store.remove(wan.keys("masks/"))
        until(lambda: len(wan.keys("masks/")) == 2, "both masks, by another child", 120)
        assert parent.poll() is None and child(parent.pid) != killed
        # It is no worker: nobody who waits for one may count on it, and it takes no job.
        running = wan.sql("SELECT FROM workers WHERE stopped_at IS NULL AND pid = :pid", pid=child(parent.pid))
        assert running == [] and [job.state for job in wan.jobs(batch)] == ["ready"] * 3
        parent.terminate()
        assert parent.wait(30) == 0
    finally:
        parent.kill()
        parent.wait()
        print(log.read_text())  # shown where the test fails
    with without_segmenter(monkeypatch):
        hire().work()
    wan.check_done(batch)
    assert sorted(map(str, origins(wan, batch))) == ["None", "store", "store"]


def child(parent: int) -> int:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    (found,) = [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found
