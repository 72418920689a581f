"""Following a batch: the status line, the bar, and the exit code that its end has."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from sqlalchemy import Engine

from chorus_batch.jobs import statistics
from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.errors import ChorusBatchError, DependencyDown
from chorus_batch.jobs.limits import enforce
from chorus_batch.jobs.statistics import Progress

INTERVAL = 0.5  # seconds between looks
PATIENCE = 120.0  # seconds that a database may be away while a batch is followed


class WaitTimedOut(ChorusBatchError):
    """The batch didn't finish in the time that was given."""

    code = "wait_timed_out"
    exit_code = 124


def line(progress: Progress) -> str:
    """One line: counts that sum to the total, hits, steps saved, rate, time left."""
    parts = [
        f"{progress.name}  {progress.state}  {progress.done}/{progress.total} done  {progress.failed} failed  "
        f"{progress.quarantined} quarantined  {progress.running} running  {progress.queued} queued"
        + (f"  {progress.cancelled} cancelled" if progress.cancelled else "")
    ]
    if progress.done:
        hits, exact = 100 * progress.hits / progress.done, 100 * progress.exact_hits / progress.done
        parts.append(f"hits {hits:.1f} % (exact {exact:.1f})")
    if progress.steps_total:
        parts.append(f"steps saved {100 * progress.steps_skipped / progress.steps_total:.1f} %")
    if progress.done and progress.elapsed > 0:
        rate = progress.done / progress.elapsed
        on = f" on {progress.workers} workers" if progress.workers else ""
        parts.append(f"{3600 * rate:.0f} videos/h{on}")
        if not progress.is_over:
            parts.append(f"ETA {_clock((progress.total - progress.finished) / rate)}")
        else:
            parts.append(f"took {_clock(progress.elapsed)}")
    if progress.max_seconds is not None:
        so_far = (progress.seconds_compute + progress.seconds_running) / 3600
        parts.append(f"{so_far:.3g} of {progress.max_seconds / 3600:.3g} GPU h")
    if progress.deadline is not None and progress.finished < progress.total:
        parts.append(f"until {progress.deadline.astimezone().isoformat(sep=' ', timespec='minutes')}")
    return " | ".join(parts)


def exit_code(progress: Progress) -> int:
    """0 done, 1 some jobs failed, 7 cancelled or past its deadline, 8 stopped by its budget."""
    if progress.state == "cancelled":
        return 7
    if progress.stopped is not None and progress.finished < progress.total:
        return 8 if progress.stopped == "budget" else 7
    return 1 if progress.failed or progress.quarantined else 0


def follow(
    engine: Engine, batch_id: int, *, timeout: float | None = None, look_after: Callable[[], None] = lambda: None
) -> Progress:
    """Wait until a batch is over, with a bar on a terminal and a line at times elsewhere, both on stderr.

    `look_after` is called at every look (to restart servers and workers). Raises WaitTimedOut after `timeout` seconds.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    began, told, console = time.monotonic(), 0.0, Console(stderr=True)
    bar = Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
    )
    away: float | None = None
    with bar if sys.stderr.isatty() else Bar(disable=True):
        task = bar.add_task("")
        while True:
            try:
                look_after()
                with transaction(engine) as connection:
                    enforce(connection)  # no worker may be alive to do it
                    progress = statistics.progress(connection, batch_id)
                away = None
            except DependencyDown:
                # A restart in mid-batch is no reason to leave: the batch goes on.
                away = away or time.monotonic()
                if time.monotonic() - away > PATIENCE:
                    raise
                time.sleep(INTERVAL)
                continue
            if progress.is_over:
                return progress
            saved = 100 * progress.steps_skipped / (progress.steps_total or 1)
            hits = 100 * progress.hits / (progress.done or 1)
            label = f"{progress.name}  hits {hits:.0f} %  steps saved {saved:.0f} %  {progress.failed} failed"
            bar.update(task, total=progress.total, completed=progress.finished, description=label)
            if not sys.stderr.isatty() and time.monotonic() - told > 10:
                print(line(progress), file=sys.stderr, flush=True)
                told = time.monotonic()
            if timeout is not None and time.monotonic() - began > timeout:
                raise WaitTimedOut(f"not over after {timeout:g} s: {line(progress)}")
            time.sleep(INTERVAL)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"
