"""The command line: `chorus-batch`. Commands hold no logic; each lives in the module named for its noun.

Modules are imported when their command is called for, heavy imports stay inside functions: `--help` answers at once.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from types import FrameType
from typing import Any

import click

from chorus_batch.jobs.errors import ChorusBatchError

# command -> (module below this package, one line of help)
COMMANDS = {
    "submit": ("submit", "Submit files of prompts as a batch."),
    "estimate": ("estimate", "Tell what files or a batch will cost, before a GPU hour is spent."),
    "list": ("batches", "List batches."),
    "status": ("batches", "Show a batch's progress."),
    "wait": ("batches", "Wait for a batch to finish."),
    "jobs": ("batches", "List a batch's jobs."),
    "show": ("batches", "Show one job: what was asked, what was reused, what was computed."),
    "retry": ("batches", "Run failed jobs again."),
    "cancel": ("batches", "Give up a batch's unfinished jobs."),
    "pause": ("batches", "Park a batch's jobs that haven't started."),
    "resume": ("batches", "Go on with a paused batch."),
    "results": ("results", "Download a batch's videos with a manifest."),
    "stats": ("stats", "Sums over hits, skipped steps and seconds."),
    "report": ("report", "Show a batch's forecast against what became of it."),
    "compare": ("compare", "Show what each of several batches of the same rows cost and what came out right."),
    "sql": ("stats", "Run a query of your own, read-only."),
    "cache": ("cache", "Look at the cache."),
    "storage": ("storage", "Look after the object store."),
    "model": ("model", "Add models, list them, verify their files."),
    "worker": ("worker", "Run workers."),
    "up": ("servers", "Start the local profile's servers."),
    "down": ("servers", "Stop the local profile's servers."),
    "ps": ("servers", "Show the local profile's servers."),
    "db": ("db", "Look after the database's schema."),
    "doctor": ("doctor", "Check that everything needed is there and works."),
}


class _ReaderGone(Exception):
    """Standard output was closed. A class of its own, for click would end with exit code 1."""


class _Commands(click.Group):
    """Imports a command's module when the command is needed, not before."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError as error:
            raise _ReaderGone from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = {"ls": "list"}.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"chorus_batch.jobs.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = module.COMMANDS[cmd_name]
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--data-dir", type=click.Path(), help="Where the local profile keeps its data (CHORUS_DATA_DIR).")
@click.option("-v", "--verbose", is_flag=True, help="Show tracebacks and log lines.")
@click.version_option(package_name="chorus-batch")
@click.pass_context
def cli(ctx: click.Context, data_dir: str | None, verbose: bool) -> None:
    """Batch text-to-video generation that reuses work across requests.

    Exit codes: 0 done, 1 finished but some jobs failed, 2 usage, 3 input rejected, 4 not found, 5 already submitted,
    6 a server is down, 7 cancelled or past its deadline, 8 budget reached, 10 internal error, 124 wait timed out,
    130 and 143 interrupted.
    """
    ctx.obj = {"data_dir": data_dir, "verbose": verbose}


def main(arguments: list[str] | None = None) -> None:
    """The console script: runs a command and exits with the code that its outcome has."""
    signal.signal(signal.SIGTERM, _terminated)
    verbose = "-v" in (sys.argv[1:] if arguments is None else arguments) or "--verbose" in sys.argv
    try:
        result: Any = cli.main(arguments, prog_name="chorus-batch", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ChorusBatchError as error:
        if verbose:
            raise
        _complain(str(error), error.hint)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except _ReaderGone:
        # `chorus-batch jobs B | head`: the reader has seen enough. What is still buffered goes nowhere, quietly.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if verbose:
            raise
        _complain(f"internal error: {type(error).__name__}: {error}", "run it again with -v and report what it shows")
        sys.exit(10)
    sys.exit(result if isinstance(result, int) else 0)


def _complain(message: str, hint: str) -> None:
    click.echo(f"{click.style('error', fg='red', bold=True)}: {message}", err=True)
    if hint:
        click.echo(f"  {hint}", err=True)


def _terminated(_number: int, _frame: FrameType | None) -> None:
    sys.exit(143)
