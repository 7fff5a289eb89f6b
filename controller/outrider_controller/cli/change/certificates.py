"""outrider create certificates, and outrider create redis-users"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import click
from outrider.metadata.connection.acl import KEYS, users
from outrider.rpc.access.roles import Role
from outrider.user_cache import private_directory, write_whole

from outrider_controller.cli.exits import CommandError, ExitCode

PUBLIC = "public"
ROLES = [role.value for role in Role]


@click.command("certificates")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--role", "roles", multiple=True, type=click.Choice(ROLES), help="Only for these.")
@click.option("--public-name", "names", multiple=True, metavar="NAME", help="A name or address that clients ask for.")
@click.option("--days", type=click.IntRange(1, 36_500), default=90, show_default=True, help="How long they are valid.")
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


@click.command("redis-users")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
def create_redis_users(directory: Path) -> None:
    """Make a user of Redis for each role: DIRECTORY/users.acl for the server, DIRECTORY/ROLE.password for processes.

    Passwords that are there already stay. A process has its own in its metadata URL:
    redis://ROLE@HOST:6379?password_file=DIRECTORY/ROLE.password. A controller has that of the control plane.
    """
    private_directory(directory)
    passwords = {role: _password(directory / f"{role}.password") for role in KEYS}
    write_whole(directory / "users.acl", users(passwords))
    click.echo(f"{directory / 'users.acl'}: {', '.join(passwords)}")


def _password(path: Path) -> str:
    if not path.exists():
        write_whole(path, secrets.token_urlsafe(32) + "\n")
    return path.read_text().strip()
