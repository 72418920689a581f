"""doctor: is everything there?"""

from __future__ import annotations

from dataclasses import asdict, replace

import click

from chorus_batch.jobs.cli.session import Session, output_options, print_json
from chorus_batch.jobs.settings import Profile


@click.command()
@click.option("--profile", type=click.Choice(["local", "production"]), help="Check this one, whatever is configured.")
@output_options
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, quiet: bool, profile: Profile | None) -> int:
    """Check that everything needed is there and works; exit code 6 if something isn't."""
    from chorus_batch.jobs.doctor import examine
    from chorus_batch.jobs.local.profile import ensure

    settings = Session.of(ctx).asked
    if profile is not None:
        settings = replace(settings, profile=profile)
    failed = False
    for finding in examine(settings, ensure):
        failed |= finding.ok is False
        if as_json:
            print_json(asdict(finding))
        elif not quiet or finding.ok is False:
            mark = {True: "ok  ", False: "FAIL", None: "-   "}[finding.ok]
            click.echo(f"{mark}  {finding.name:10}  {finding.detail}")
            if finding.ok is False and finding.hint:
                click.echo(f"                  {finding.hint}")
    return 6 if failed else 0


COMMANDS = {"doctor": doctor}
