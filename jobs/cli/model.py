"""model: which models there are besides the built-in one, and whether their files are whole."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from chorus_batch.jobs.cli.estimate import size
from chorus_batch.jobs.cli.session import Session, output_options, print_json, print_table

if TYPE_CHECKING:
    from chorus_batch.jobs.cards.card import ModelCard


@click.group()
def model() -> None:
    """Add models, list them, verify their files."""


@model.command()
@click.argument("name")
@click.argument("folder")
@click.option(
    "--checkpoint",
    default="",
    metavar="FILE|FOLDER",
    help="The transformer's weights as .safetensors, in Wan's own names, in place of the folder's.",
)
@click.option("--lora", default="", metavar="FILE", help="A LoRA that is added to the transformer.")
@click.option("--lora-strength", default=1.0, show_default=True, help="What the LoRA is multiplied by.")
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Of the transformer and the text encoder; the codec is float32.",
)
@click.option("--distilled", is_flag=True, help="Runs 4 Euler steps at shift 5 without guidance, as LightX2V's do.")
@click.option("--replace", is_flag=True, help="Write the card of that name anew.")
@output_options
@click.pass_context
def add(ctx: click.Context, /, as_json: bool, quiet: bool, dtype: str, **asked: Any) -> None:
    """Add a Wan2.1 text-to-video model: a folder in diffusers' layout, or the hub's name of one.

    Reads all its files once for their checksums, and writes a card to the models folder (CHORUS_MODELS_DIR). Use it
    with CHORUS_MODEL=NAME.
    """  # fmt: skip
    from chorus_batch.jobs import registry

    dtypes = {"bf16": "bfloat16", "fp32": "float32"}
    card = registry.add(Session.of(ctx).asked, registry.Asked(**asked, dtype=dtypes[dtype]), _progress)
    _show(card, as_json, quiet)


@model.command("list")
@output_options
@click.pass_context
def list_(ctx: click.Context, as_json: bool, quiet: bool) -> None:
    """List the models that jobs can name."""
    from chorus_batch.jobs.cards.card import known_cards, load_card

    models = Session.of(ctx).asked.models_folder
    cards = [load_card(name, models) for name in sorted(known_cards(models))]
    if as_json or quiet:
        for card in cards:
            _show(card, as_json, quiet)
        return
    titles = {"name": "MODEL", "dtype": "DTYPE", "steps": "STEPS", "fingerprint": "WEIGHTS", "folder": "FOLDER"}
    print_table(map(_row, cards), {**titles, "checkpoint": "CHECKPOINT", "lora": "LORA"})


@model.command()
@click.argument("name")
@output_options
@click.pass_context
def verify(ctx: click.Context, name: str, as_json: bool, quiet: bool) -> None:
    """Read every file of a model again and compare its sha256 with the card's."""
    from chorus_batch.jobs import registry

    _show(registry.verify(Session.of(ctx).asked, name, _progress), as_json, quiet)


def _row(card: ModelCard) -> dict[str, Any]:
    weights = card.weights
    lora = f"{weights.lora} x {weights.lora_strength:g}" if weights is not None and weights.lora else ""
    return {
        "name": card.name,
        "dtype": card.dtype,
        "steps": card.defaults.steps,
        "fingerprint": card.fingerprint[:12],
        "folder": weights.folder if weights is not None else "(comes with the program)",
        "checkpoint": weights.checkpoint if weights is not None else "",
        "lora": lora,
    }


def _show(card: ModelCard, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json(card)
    elif quiet:
        click.echo(card.name)
    else:
        row = _row(card)
        click.echo(f"{card.name}: weights {row['fingerprint']} in {row['folder']}")


def _progress(done: int, total: int) -> None:
    """One line, written over; for a person's screen only."""
    if sys.stderr.isatty():
        click.echo(f"\rread {size(done)} of {size(total)} ", err=True, nl=done >= total)


COMMANDS = {"model": model}
