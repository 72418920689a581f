"""list, status, wait, jobs, show, and what a person does to a batch: cancel, pause, resume, retry."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from chorus_batch.jobs.cli.session import Session, output_options, plain, print_json, print_table

if TYPE_CHECKING:
    from chorus_batch.jobs.statistics import Progress

STATES = ("waiting", "ready", "paused", "running", "done", "failed", "quarantined", "cancelled")


@click.command("list")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="How many, the newest first.")
@output_options
@click.pass_context
def list_(ctx: click.Context, limit: int, as_json: bool, quiet: bool) -> None:
    """List batches, the newest first."""
    from chorus_batch.jobs import statistics
    from chorus_batch.jobs.database import transaction
    from chorus_batch.jobs.progress import line

    with transaction(Session.of(ctx).database) as connection:
        found = statistics.batches(connection, limit)
    for progress in found:
        if as_json:
            print_json(asdict(progress))
        else:
            click.echo(progress.batch_id if quiet else f"{progress.batch_id}  {line(progress)}")


@click.command()
@click.argument("batch")
@click.option("--watch", is_flag=True, help="Follow until it is over.")
@output_options
@click.pass_context
def status(ctx: click.Context, batch: str, watch: bool, as_json: bool, quiet: bool) -> None:
    """Show a batch's progress."""
    from chorus_batch.jobs.progress import follow, line

    session = Session.of(ctx)
    batch_id = _batch(session, batch)
    progress = follow(session.database, batch_id) if watch else _progress(session, batch_id)
    if as_json:
        print_json(asdict(progress))
    else:
        click.echo(progress.batch_id if quiet else line(progress))


@click.command()
@click.argument("batch")
@click.option("--timeout", type=float, help="Give up after so many seconds (exit code 124).")
@output_options
@click.pass_context
def wait(ctx: click.Context, batch: str, timeout: float | None, as_json: bool, quiet: bool) -> int:
    """Wait for a batch to finish.

    Exit code 0 if every job is done, 1 if some failed, 7 if it was cancelled or its deadline is past, 8 if its budget
    is spent.
    """
    from chorus_batch.jobs.progress import exit_code, follow, line

    session = Session.of(ctx)
    batch_id = _batch(session, batch)
    progress = follow(session.database, batch_id, timeout=timeout)
    if as_json:
        print_json(asdict(progress))
    else:
        click.echo(progress.batch_id if quiet else line(progress))
    return exit_code(progress)


@click.command()
@click.argument("batch")
@click.option("--state", type=click.Choice(STATES), help="Only jobs in this state.")
@click.option("--code", help="Only jobs with this error code.")
@output_options
@click.pass_context
def jobs(ctx: click.Context, batch: str, state: str | None, code: str | None, as_json: bool, quiet: bool) -> None:
    """List a batch's jobs in row order."""
    from chorus_batch.jobs import statistics
    from chorus_batch.jobs.database import transaction

    session = Session.of(ctx)
    batch_id = _batch(session, batch)
    with transaction(session.database) as connection:
        rows = statistics.jobs(connection, batch_id, state=state, code=code)
        if as_json:
            for row in rows:
                print_json(row)
        elif quiet:
            for row in rows:
                click.echo(row["job"])
        else:
            titles = {"job": "JOB", "id": "ID", "state": "STATE", "cache_result": "CACHE", "similarity": "SIMILARITY"}
            titles |= {"source": "SOURCE", "steps_computed": "STEPS", "error_code": "ERROR", "prompt": "PROMPT"}
            print_table(rows, titles)


@click.command()
@click.argument("job")
@output_options
@click.pass_context
def show(ctx: click.Context, job: str, as_json: bool, quiet: bool) -> None:
    """Show one job (its number, or BATCH/ID): what was asked, why what was reused, what was computed."""
    from chorus_batch.jobs import statistics
    from chorus_batch.jobs.database import transaction

    with transaction(Session.of(ctx).database) as connection:
        found = statistics.job(connection, statistics.find_job(connection, job))
    if as_json:
        print_json(found)
    elif quiet:
        click.echo(found["id"])
    else:
        _print_job(found)


@click.command()
@click.argument("batch")
@click.option("--code", help="Only jobs with this error code.")
@click.pass_context
def retry(ctx: click.Context, batch: str, code: str | None) -> None:
    """Run a batch's failed and quarantined jobs again."""
    from chorus_batch.jobs import control
    from chorus_batch.jobs.dispatch import nudge

    session = Session.of(ctx)
    count = control.retry(session.database, _batch(session, batch), code)
    nudge(session.settings)
    click.echo(count)


@click.command()
@click.argument("batch")
@click.option("--yes", is_flag=True, help="Don't ask.")
@click.pass_context
def cancel(ctx: click.Context, batch: str, yes: bool) -> None:
    """Give up a batch's unfinished jobs. Finished videos stay."""
    from chorus_batch.jobs import control

    session = Session.of(ctx)
    batch_id = _batch(session, batch)
    if not yes:
        click.confirm(f"Give up the unfinished jobs of batch {batch}?", abort=True, err=True)
    click.echo(control.cancel(session.database, batch_id))


@click.command()
@click.argument("batch")
@click.pass_context
def pause(ctx: click.Context, batch: str) -> None:
    """Park a batch's jobs that haven't started; running ones finish."""
    from chorus_batch.jobs import control

    session = Session.of(ctx)
    click.echo(control.pause(session.database, _batch(session, batch)))


@click.command()
@click.argument("batch")
@click.option("--max-gpu-hours", metavar="X", help="The batch's budget from now on, what is spent included; or none.")
@click.option("--deadline", metavar="T", help="Its deadline from now on: a time, a duration, or none.")
@click.pass_context
def resume(ctx: click.Context, batch: str, max_gpu_hours: str | None, deadline: str | None) -> None:
    """Go on with a batch that was paused, or stopped by a limit that is raised with it."""
    from chorus_batch.jobs import control, limits
    from chorus_batch.jobs.dispatch import nudge

    session = Session.of(ctx)
    changed: dict[str, Any] = {}
    if max_gpu_hours is not None:
        changed["max_seconds"] = limits.parse_budget(max_gpu_hours)
    if deadline is not None:
        changed["deadline"] = None if deadline == "none" else limits.parse_deadline(deadline)
    click.echo(control.resume(session.database, _batch(session, batch), changed))
    nudge(session.settings)


def _batch(session: Session, name: str) -> int:
    from chorus_batch.jobs import statistics
    from chorus_batch.jobs.database import transaction

    with transaction(session.database) as connection:
        return statistics.find_batch(connection, name)


def _progress(session: Session, batch_id: int) -> Progress:
    from chorus_batch.jobs import statistics
    from chorus_batch.jobs.database import transaction

    with transaction(session.database) as connection:
        return statistics.progress(connection, batch_id)


def _print_job(found: dict[str, Any]) -> None:
    domain, generation, entry = found["domain"], found["generation"], found["entry"]
    click.echo(f"job {found['id']} ({found['batch']}/{found['external_id']}): {found['state']}")
    click.echo(f"  prompt      {found['prompt']}")
    click.echo(
        f"  asked       seed {found['seed']}, {domain['width']}x{domain['height']}, {domain['frames']} frames,",
        nl=False,
    )
    click.echo(f" {domain['steps']} steps, guidance {domain['guidance_scale']}, {domain['model']}")
    step_cache = f", step cache {domain['step_cache']}" if domain["step_cache"] != "none" else ""
    click.echo(f"  policy      {domain['policy']}{step_cache}")
    planned = f" of job {found['source_job_id']}" if found["source_job_id"] else ""
    planned = f" of entry {found['source_entry_id']}" if found["source_entry_id"] else planned
    score = f", similarity {found['similarity']:.3f}" if found["similarity"] is not None else ""
    click.echo(
        f"  planned     {found['role'].value if hasattr(found['role'], 'value') else found['role']}{planned}{score}"
    )
    if found["error_code"]:
        click.echo(f"  error       {found['error_code']}: {found['error_message']}")
    if generation:
        _print_generation(generation, entry)
    for attempt in found["attempts"]:
        ended = plain(attempt["ended_at"]) if attempt["ended_at"] else "running"
        click.echo(
            f"  attempt {attempt['attempt']}   {attempt['result'] or 'running'} {ended} {attempt['error_code'] or ''}"
        )
    if found["extra"]:
        click.echo(f"  columns     {json.dumps(found['extra'], default=plain)}")


def _print_generation(generation: dict[str, Any], entry: dict[str, Any] | None) -> None:
    result = generation["cache_result"]
    if result == "semantic" and entry is not None:
        click.echo(
            f"  reused      entry {entry['id']} of job {entry['job_id']}, similarity {generation['similarity']:.3f}:"
        )
        click.echo(f"              {entry['prompt']}")
        k1, k2 = generation["k1"], generation["k2"]
        click.echo(f"              steps 0..{k1} of {generation['steps_total']} taken from it")
        if k2 > k1:
            click.echo(f"              steps {k1}..{k2} computed where the prompts differ, the rest taken from it")
    elif result == "exact":
        click.echo(f"  reused      everything: job {generation['origin_job_id']} made the same request")
    else:
        click.echo("  reused      nothing")
    _print_details(generation)
    computed, total = generation["tokens_computed"], generation["tokens_total"]
    click.echo(f"  computed    {generation['steps_computed']} of {generation['steps_total']} steps,", nl=False)
    click.echo(f" {generation['forward_passes']} passes, {computed} of {total} tokens, {generation['flops']:.3g} FLOPs")
    spent = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in generation["seconds"].items())
    click.echo(f"  seconds     {generation['seconds_total']:.3f} ({spent})")
    if generation["scores"]:
        seen = [f"{name} {'right' if right else 'WRONG'}" for name, right in sorted(generation["scores"].items())]
        click.echo(f"  attributes  {', '.join(seen)}")
    for note in generation["notes"]:
        click.echo(f"  note        {note}")
    click.echo(f"  video       {generation['video_key']} ({generation['video_bytes']} bytes)")


def _print_details(generation: dict[str, Any]) -> None:
    """What differed, and what was done about it; what isn't known here is shown as it is."""
    details = dict(generation["details"])
    phrases = details.pop("phrases", None)
    differs = [generation["kind"], generation["scope"]]
    differs += [f'"{phrases[0]}" became "{phrases[1]}"'] if phrases else []
    if any(differs):
        click.echo(f"  difference  {', '.join(filter(None, differs))}")
    if tokens := details.pop("tokens", None):
        click.echo(f"  amplified   tokens {', '.join(map(str, tokens))}")
    gains = details.pop("gains", None) or []
    if any(pair != [1, 1] for pair in gains):
        click.echo(f"  gains       of keys   {_each_step(key for key, _ in gains)}")
        click.echo(f"              of output {_each_step(output for _, output in gains)}")
    visible = details.pop("visible", None) or []
    if any(share != 1 for share in visible):
        click.echo(f"  visible     {_each_step(visible)} of the tokens")
    if regions := details.pop("regions", None):
        click.echo(f"  masks       sha256 {regions}")
    for name, value in details.items():
        if value is not None:
            click.echo(f"  {name:11} {value if isinstance(value, str) else json.dumps(value, default=plain)}")


def _each_step(values: Iterable[float]) -> str:
    """The value of each computed step; runs of equal ones are counted."""
    runs = [(value, len(list(run))) for value, run in groupby(f"{value:.3g}" for value in values)]
    return ", ".join(f"{count} x {value}" if count > 1 else value for value, count in runs)


COMMANDS = {
    "list": list_,
    "status": status,
    "wait": wait,
    "jobs": jobs,
    "show": show,
    "retry": retry,
    "cancel": cancel,
    "pause": pause,
    "resume": resume,
}
