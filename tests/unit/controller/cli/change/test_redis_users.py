"""outrider create redis-users. What the users may do is shown on a real server: integration/metadata."""

from __future__ import annotations

import hashlib
from pathlib import Path

from click.testing import CliRunner
from outrider.metadata.connection.acl import KEYS
from outrider_controller.cli.app import cli


def test_each_role_has_a_user_whose_password_is_in_its_file_alone(tmp_path: Path) -> None:
    for _ in range(2):
        result = CliRunner().invoke(cli, ["create", "redis-users", str(tmp_path / "redis")], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    users = (tmp_path / "redis" / "users.acl").read_text()
    assert users.startswith("user default off\n") and len(users.splitlines()) == 1 + len(KEYS)
    for role in KEYS:
        path = tmp_path / "redis" / f"{role}.password"
        password = path.read_text().strip()
        assert path.stat().st_mode & 0o777 == 0o600 and len(password) > 30
        assert f"user {role} on #{hashlib.sha256(password.encode()).hexdigest()} " in users
        assert password not in users
