"""outrider create certificates: what it makes, processes take."""

from __future__ import annotations

import ssl
from pathlib import Path

from click.testing import CliRunner
from outrider.rpc.access.certificates import cluster_tls, public_tls
from outrider.rpc.access.roles import Role
from outrider_controller.cli.app import cli


def create(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["create", "certificates", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_each_role_gets_what_its_processes_accept(tmp_path: Path) -> None:
    said = create(str(tmp_path), "--public-name", "api.example.org", "--public-name", "10.0.0.7")
    for role in Role:
        assert cluster_tls(role, str(tmp_path / role.value)) is not None
    for role in (Role.ROUTER, Role.CONTROL):
        assert cluster_tls(role, str(tmp_path / "controller")) is not None
    assert public_tls(str(tmp_path / "public")) is not None
    assert "public: api.example.org, 10.0.0.7, for 90 days" in said
    keys = [*tmp_path.glob("**/*.key")]
    assert len(keys) == len(Role) + 3 and {path.stat().st_mode & 0o777 for path in keys} == {0o600}


def test_they_are_valid_for_so_many_days_as_a_calendar_has(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["create", "certificates", str(tmp_path), "--days", str(10**20)])
    assert result.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_made_again_they_are_new_and_of_the_same_authority(tmp_path: Path) -> None:
    create(str(tmp_path))
    files = [tmp_path / "draft" / name for name in ("tls.crt", "ca.crt")]
    before, other = [path.read_bytes() for path in files], (tmp_path / "target" / "tls.crt").read_bytes()
    create(str(tmp_path), "--role", "draft", "--days", "7")
    after = [path.read_bytes() for path in files]
    assert after[0] != before[0] and after[1] == before[1] == (tmp_path / "ca.crt").read_bytes()
    assert (tmp_path / "target" / "tls.crt").read_bytes() == other
    ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
