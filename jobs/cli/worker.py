"""worker: run and list workers."""

from __future__ import annotations

import os

import click

from chorus_batch.jobs.cli.session import Session, output_options, print_json, print_table


@click.group()
def worker() -> None:
    """Run workers."""


@worker.command()
@click.option("--device", help="auto, cpu, cuda or cuda:N; one worker for each device.")
@click.option("--gpus", metavar="LIST", help="A worker process for each of these GPUs: 0,1 or all.")
@click.option(
    "--queue",
    type=click.Choice(["jobs", "masks"]),
    default="jobs",
    show_default=True,
    help="masks: makes the masks that jobs will ask for, and runs none itself.",
)
@click.option("--name", default="worker", show_default=True, help="What the worker is called in the logs.")
@click.pass_context
def start(ctx: click.Context, device: str | None, gpus: str | None, queue: str, name: str) -> None:
    """Run a worker in the foreground until it is told to stop. SIGTERM ends it at the next denoising step.

    It refuses to start where the configured model, differ, attention backend or compiler can't be used here.
    With --gpus one for each GPU, each seeing that one alone; one that ends by itself is started again.
    """
    from dataclasses import replace

    from chorus_batch.jobs import fitness
    from chorus_batch.jobs.companion import worker_command, worker_environment
    from chorus_batch.jobs.dispatch import QUEUES
    from chorus_batch.jobs.errors import UsageError
    from chorus_batch.jobs.fleet import Fleet, environment_of, parse
    from chorus_batch.jobs.settings import visible_gpus

    if device and gpus:
        raise UsageError("--device and --gpus can't be given together", hint="use --gpus 0 for a single GPU")
    indices = parse(gpus, visible_gpus()) if gpus else []

    session = Session.of(ctx)
    if queue == "masks" and session.asked.segmenter_folders is None:
        raise UsageError(
            f"the segmenter {session.asked.segmenter} needs no worker of its own",
            hint="set CHORUS_SEGMENTER=grounded:<GroundingDINO>,<SAM 2>, or leave --queue masks out",
        )
    session.database.dispose()
    settings = replace(session.settings, device=device) if device else session.settings
    level = "info" if ctx.obj["verbose"] else "warning"
    environ = worker_environment(settings)
    fitness.check(settings, environment_of(indices[0], environ) if indices else environ)
    if indices:
        commands = {
            index: worker_command(name=f"{name}-{index}", log_level=level, queue=QUEUES[queue]) for index in indices
        }
        Fleet(commands, environ).run()
        return
    command = worker_command(name=name, log_level=level, queue=QUEUES[queue])
    # Replaced, not spawned: signals then reach Celery itself.
    os.execve(command[0], command, environ)


@worker.command("list")
@output_options
@click.pass_context
def list_(ctx: click.Context, as_json: bool, quiet: bool) -> None:
    """The workers that are alive, and what they run."""
    from chorus_batch.jobs import leases
    from chorus_batch.jobs.database import transaction

    session = Session.of(ctx)
    with transaction(session.database) as connection:
        rows = leases.workers(connection, session.settings.lease)
    if as_json:
        for row in rows:
            print_json(row)
    elif quiet:
        for row in rows:
            click.echo(row["id"])
    else:
        titles = {"id": "WORKER", "host": "HOST", "pid": "PID", "device": "DEVICE", "started_at": "STARTED"}
        print_table(rows, {**titles, "heartbeat_at": "HEARTBEAT", "running": "RUNNING", "finished": "FINISHED"})


COMMANDS = {"worker": worker}
