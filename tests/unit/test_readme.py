"""The README names what there is, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import click

from chorus_batch.jobs.cli import COMMANDS, cli

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


def subcommands(name: str) -> list[str]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return list(command.commands) if isinstance(command, click.Group) else []


def test_every_command_stands_in_the_readme() -> None:
    table = README.partition("## Commands")[2].partition("## ")[0]
    for name in COMMANDS:
        wanted = [f"{name} {sub}" for sub in subcommands(name)] or [name]
        for command in wanted:
            assert re.search(rf"`{command}[ `]", table), command


def test_the_readme_calls_only_commands_that_exist() -> None:
    for name in re.findall(r"(?:`|run )chorus-batch ([a-z]+)", README):
        assert name in COMMANDS, name


def test_every_folder_and_file_that_is_named_exists() -> None:
    root = Path(__file__).parents[2]
    for path in re.findall(r"`?((?:jobs|workers|chorus|kernels|migrations|tests|\.ci)/[\w./]*)", README):
        assert (root / path).exists(), path
