"""outrider create certificates."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import click
from outrider.rpc.access.roles import Role

from outrider_controller.cli.exits import CommandError, ExitCode

PUBLIC = "public"
ROLES = [role.value for role in Role]


@click.command("certificates")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--role", "roles", multiple=True, type=click.Choice(ROLES), help="Only for these.")
@click.option("--public-name", "names", multiple=True, metavar="NAME", help="A name or address that clients ask for.")
@click.option("--days", type=click.IntRange(1), default=90, show_default=True, help="How long they are valid.")
def create_certificates(directory: Path, roles: Sequence[str], names: Sequence[str], days: int) -> None:
    """Make a certificate for each role, signed by an authority in DIRECTORY, which is made where there is none.

    DIRECTORY/ROLE goes to the machines of that role, for --tls-dir. DIRECTORY/controller has the roles of a controller:
    router and control plane. DIRECTORY/public, with --public-name, is for the gateway's --public-tls-dir. Made again,
    they take the place of the old ones, and processes take them up without a restart. ca.key stays here.
    """
    # Only here: it is for those who make certificates.
    from outrider_controller.certificates import Authority

    wanted = {role: [Role(role).dns_name] for role in roles or ROLES}
    if not roles:
        wanted["controller"] = [Role.ROUTER.dns_name, Role.CONTROL.dns_name]
    if names:
        wanted[PUBLIC] = list(names)
    try:
        authority = Authority.open(directory)
        for folder, folder_names in wanted.items():
            authority.issue(folder_names, timedelta(days=days)).write(directory / folder, authority.pem)
            click.echo(f"{directory / folder}: {', '.join(folder_names)}, for {days} days")
    except (OSError, ValueError) as error:
        raise CommandError(str(error), ExitCode.ERROR) from error
