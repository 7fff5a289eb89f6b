"""outrider create redis-users."""

from __future__ import annotations

import secrets
from pathlib import Path

import click
from outrider.metadata.connection.acl import KEYS, users

from outrider_controller.private import make_private, write_whole


@click.command("redis-users")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
def create_redis_users(directory: Path) -> None:
    """Make a user of Redis for each role: DIRECTORY/users.acl for the server, DIRECTORY/ROLE.password for processes.

    Passwords that are there already stay. A process has its own in its metadata URL:
    redis://ROLE@HOST:6379?password_file=DIRECTORY/ROLE.password. A controller has that of the control plane.
    """
    make_private(directory)
    passwords = {role: _password(directory / f"{role}.password") for role in KEYS}
    write_whole(directory / "users.acl", users(passwords))
    click.echo(f"{directory / 'users.acl'}: {', '.join(passwords)}")


def _password(path: Path) -> str:
    if not path.exists():
        write_whole(path, secrets.token_urlsafe(32) + "\n")
    return path.read_text().strip()
