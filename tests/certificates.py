"""Certificates for tests: of one cluster, and such as it must refuse.

What makes them is imported where it is used, so that an environment from before it still collects all other tests.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from outrider.rpc.access.certificates import TlsFiles
from outrider.rpc.access.roles import Role

_LIFE = timedelta(hours=1)


class Cluster:
    """One authority, and a directory for what it signs."""

    def __init__(self, directory: Path) -> None:
        from outrider_controller.certificates import Authority

        self.authority = Authority.new()
        self._directory = directory

    def files(self, *roles: Role, name: str = "") -> TlsFiles:
        """Of a process with these roles."""
        return self.issue(name or "-".join(role.value for role in roles), *(role.dns_name for role in roles))

    def issue(self, folder: str, *names: str) -> TlsFiles:
        self.authority.issue(names, _LIFE).write(self._directory / folder, self.authority.pem)
        return TlsFiles(self._directory / folder)

    def expired(self, role: Role) -> TlsFiles:
        directory = self._directory / f"expired-{role.value}"
        issued = self.authority.issue([role.dns_name], _LIFE, datetime.now(UTC) - 2 * _LIFE)
        issued.write(directory, self.authority.pem)
        return TlsFiles(directory)

    def of_another_authority(self, role: Role) -> TlsFiles:
        """Whose holder trusts this cluster, so that it is the cluster that has to refuse."""
        from outrider_controller.certificates import Authority

        directory = self._directory / f"stranger-{role.value}"
        Authority.new("Somebody else").issue([role.dns_name], _LIFE).write(directory, self.authority.pem)
        return TlsFiles(directory)
