"""Clusters by name: kept in a private file that holds no secret, and asked with their own files alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click
import pytest
import yaml
from outrider_controller.cli.app import run
from outrider_controller.cli.clusters import contexts

AT = ("--control", "127.0.0.1:2", "--gateway", "127.0.0.1:3")
Command = Callable[..., str]


@pytest.fixture
def outrider(capsys: pytest.CaptureFixture[str]) -> Command:
    """What a command printed: on stderr where it was to fail."""

    def command(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        assert run(arguments) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return command


def listed(outrider: Command) -> list[tuple[str, bool]]:
    return [(one["name"], one["default"]) for one in json.loads(outrider("get", "contexts", "-o", "json"))["contexts"]]


def test_clusters_are_named_chosen_listed_and_forgotten(outrider: Command, file: Path) -> None:
    outrider("config", "set-context", "prod", *AT)
    outrider("config", "set-context", "test", *AT, "--model", "m")
    assert outrider("config", "current-context") == "prod\n"
    outrider("config", "use-context", "test")
    assert listed(outrider) == [("test", True), ("prod", False)]
    assert outrider("config", "get-contexts", "-o", "name") == "test\nprod\n"
    assert outrider("config", "set-context", "test", "--control", "127.0.0.1:9") == "test is at 127.0.0.1:9\n"
    kept = yaml.safe_load(file.read_text())
    assert kept["contexts"]["test"] == {"control": "127.0.0.1:9", "gateway": "127.0.0.1:3", "model": "m"}
    assert file.stat().st_mode & 0o777 == 0o600
    outrider("config", "delete-context", "test")
    assert "nobody" in outrider("config", "use-context", "nobody", code=3)
    assert "no cluster is named" in outrider("config", "current-context", code=3)
    assert listed(outrider) == [("prod", False)]


def test_commands_ask_the_current_cluster_or_the_one_that_is_named(outrider: Command) -> None:
    outrider("config", "set-context", "prod", *AT)
    outrider("config", "set-context", "test", "--control", "127.0.0.1:4", "--gateway", "127.0.0.1:5")
    assert "127.0.0.1:2" in outrider("get", "workers", code=5)
    assert "127.0.0.1:4" in outrider("get", "workers", "--context", "test", code=5)
    assert "prod has no model" in outrider("generate", "hi", code=2)
    with ExitStack() as exits:
        name = exits.enter_context(contexts.claimed(""))
        contexts.publish(name, {"model": "m", "grpc": "127.0.0.1:6", "http": "", "control": "127.0.0.1:7"})
        error = outrider("get", "workers", code=5)
        assert "asking prod" in error and "default" in error and "127.0.0.1:2" in error
        assert "127.0.0.1:7" in outrider("get", "workers", "--context", "default", code=5)
        outrider("config", "use-context", "default")
        assert "127.0.0.1:7" in outrider("get", "workers", code=5)


def test_a_stack_does_not_take_the_name_of_a_cluster(outrider: Command) -> None:
    outrider("config", "set-context", "default", *AT)
    with contexts.claimed("") as name:
        assert name == "default-2"
    with pytest.raises(contexts.CommandError, match="a cluster is named default"), contexts.claimed("default"):
        pass


def test_what_a_cluster_is_trusted_with_goes_to_its_own_addresses_alone(outrider: Command, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("operator\n")
    (tmp_path / "key").write_text("ork-1\n")
    files = ("--token-file", str(tmp_path / "token"), "--api-key-file", str(tmp_path / "key"))
    outrider("config", "set-context", "prod", *AT, *files, "--server-name", "api.example.org")
    with click.Context(click.Command("any")) as ctx:
        assert contexts.operator_token("127.0.0.1:2") == ""
        contexts.want(ctx, "prod")
        assert (contexts.operator_token("127.0.0.1:2"), contexts.api_key("127.0.0.1:3")) == ("operator", "ork-1")
        assert contexts.cluster_at(gateway="127.0.0.1:3").server_name == "api.example.org"
        assert (contexts.operator_token("127.0.0.1:3"), contexts.api_key("127.0.0.1:2")) == ("", "")
        assert contexts.cluster_at(gateway="127.0.0.1:2").server_name == ""
    (tmp_path / "token").unlink()
    assert "token: No such file" in outrider("get", "workers", code=1)


@pytest.mark.parametrize(
    "arguments",
    [
        ("../x", *AT),
        ("new", "--control", "127.0.0.1:2"),
        ("new", "--control", "nowhere", "--gateway", "127.0.0.1:3"),
        ("new", *AT, "--token-file", "/nonexistent"),
        ("new", *AT, "--gateway-ca", "/nonexistent"),
    ],
)
def test_what_names_no_cluster_is_refused(outrider: Command, file: Path, arguments: tuple[str, ...]) -> None:
    outrider("config", "set-context", *arguments, code=2)
    assert not file.exists()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("contexts: {a: {control: 1}}", "contexts.a.control"),
        ("contexts: {a: {token: x}}", "contexts.a.token"),
        ("contexts: [a]", "contexts: has to be a mapping"),
        ("context: {}", "context"),
        ("contexts: [", "not valid YAML"),
    ],
)
def test_a_bad_file_is_named_with_the_field(outrider: Command, file: Path, text: str, complaint: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    error = outrider("get", "workers", code=2)
    assert str(file) in error and complaint in error and len(error.splitlines()) == 1


def test_a_file_that_others_may_write_is_not_believed(outrider: Command, file: Path) -> None:
    outrider("config", "set-context", "prod", *AT)
    file.chmod(0o622)
    assert "chmod 600" in outrider("get", "workers", code=2)
