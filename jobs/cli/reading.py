"""How files are to be read and planned: the options that `submit` and `estimate` share."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from chorus_batch.jobs.cli.session import Session
from chorus_batch.jobs.parameters import POLICIES

if TYPE_CHECKING:
    from chorus_batch.jobs.ingest.rows import IngestOptions

_C = TypeVar("_C", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
                 help="A parameter for every row; repeatable."),
    click.option("--map", "mapping", multiple=True, metavar="THEIRS=OURS", help="What a column means; repeatable."),
    click.option("--format", "format_", default="auto", show_default=True, help="auto, csv, tsv, txt, jsonl, openai."),
    click.option("--encoding", help="The file's encoding, if it isn't UTF-8."),
    click.option("--seed-policy", default="row", show_default=True, help="row, hash or fixed:N."),
    click.option("--repeat", default=1, show_default=True, help="Videos for each row that doesn't say."),
    click.option("--dup-policy", type=click.Choice(["error", "skip", "suffix"]), default="error", show_default=True),
    click.option("--on-invalid", type=click.Choice(["file", "row"]), default="file", show_default=True,
                 help="What an invalid row costs: the whole submit, or the row."),
    click.option("--priority", default=0, show_default=True, help="Of rows that don't say; higher goes first."),
    click.option("--cache", type=click.Choice(["on", "exact", "readonly", "off"]), default="on", show_default=True),
    click.option("--policy", type=click.Choice(POLICIES),
                 help="What rows that don't say reuse of similar ones: nothing, the first steps, or all three stages;"
                 " the model's own if left out."),
)  # fmt: skip


def reading_options(command: _C) -> _C:
    """What the rows mean and what they may reuse."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def ingest_options(session: Session, options: Mapping[str, Any], *, truncate: bool) -> IngestOptions:
    """How the files are to be read, from a command's options."""
    from chorus_batch.jobs.cards.card import load_card
    from chorus_batch.jobs.ingest.rows import IngestOptions, parse_pairs

    return IngestOptions(
        card=load_card(session.asked.model, session.asked.models_folder),
        format=options["format_"],
        encoding=options["encoding"],
        mapping=parse_pairs("--map", options["mapping"]),
        overrides=parse_pairs("--set", options["overrides"]),
        seed_policy=options["seed_policy"],
        repeat=options["repeat"],
        dup_policy=options["dup_policy"],
        truncate=truncate,
        priority=options["priority"],
        salt=secrets.randbits(64),
        policy=options["policy"],
    )
