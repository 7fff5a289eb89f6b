"""The clusters that an operator has named, in a file: OUTRIDER_CONTEXTS_FILE, or outrider/config.yaml in
XDG_CONFIG_HOME or ~/.config. It says where secrets lie, and holds none. Stacks that run here are in none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from outrider.configuration import ConfigError, read_mapping
from outrider.user_cache import private_directory, write_whole

from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.private import locked

FILES = ("tls_dir", "gateway_ca", "server_name", "token_file", "api_key_file")
_FIELDS = ("control", "gateway", "model", *FILES)


@dataclass(frozen=True, slots=True)
class Context:
    """Where a cluster is, and the files with which to come in. Empty: without. One with a pid runs here."""

    name: str = ""
    control: str = ""
    gateway: str = ""
    """Of its gRPC API."""
    model: str = ""
    tls_dir: str = ""
    """With tls.crt, tls.key and ca.crt of an operator."""
    gateway_ca: str = ""
    """The authority of the gateway's certificate, or `system`."""
    server_name: str = ""
    """What the gateway's certificate names, if not the host in its address."""
    token_file: str = ""
    """The operator's token, or an API key for admins: for the control plane."""
    api_key_file: str = ""
    """For the gateway."""
    http: str = ""
    pid: int = 0
    process_started_s: float = 0.0
    """By the system's clock."""
    started_s: float = 0.0
    """Unix time."""

    @property
    def endpoints(self) -> dict[str, str]:
        """`model`, `grpc`, `http` and `control`; empty where unknown."""
        return {"model": self.model, "grpc": self.gateway, "http": self.http, "control": self.control}

    @property
    def files(self) -> dict[str, str]:
        """What it takes to come in."""
        return {name: getattr(self, name) for name in FILES}


@dataclass(slots=True)
class Clusters:
    """All of the file."""

    current: str = ""
    named: dict[str, Context] = field(default_factory=dict)


def read() -> Clusters:
    """Nothing without a file. Raises CommandError that names the file and the field."""
    file = _file()
    if not file.exists():
        return Clusters()
    if file.stat().st_mode & 0o022:
        # Who writes it says where an operator's tokens are sent.
        raise CommandError(f"{file}: others may write it: chmod 600", ExitCode.USAGE, reason="INVALID_FILE")
    try:
        given = read_mapping(file)
        named = _mapping("contexts", given.pop("contexts", {}))
        current = given.pop("current-context", "")
        if given or not isinstance(current, str):
            raise ConfigError(f"has to have current-context, a name, and contexts; not {', '.join(given) or current!r}")
        return Clusters(current, {str(name): _cluster(str(name), value) for name, value in named.items()})
    except ConfigError as error:
        message = str(error) if str(file) in str(error) else f"{file}: {error}"
        raise CommandError(message, ExitCode.USAGE, reason="INVALID_FILE") from None


@contextmanager
def changed() -> Iterator[Clusters]:
    """What the file has, to be changed in the block and then written. One process at a time does that."""
    file = _file()
    with locked(private_directory(file.parent)):
        clusters = read()
        yield clusters
        named = {name: {f: getattr(one, f) for f in _FIELDS if getattr(one, f)} for name, one in clusters.named.items()}
        write_whole(file, yaml.safe_dump({"current-context": clusters.current, "contexts": named}, sort_keys=False))


def _file() -> Path:
    if chosen := os.environ.get("OUTRIDER_CONTEXTS_FILE"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "outrider" / "config.yaml"
    except RuntimeError as error:
        raise FileNotFoundError("no home directory is known: set OUTRIDER_CONTEXTS_FILE") from error


def _cluster(name: str, given: Any) -> Context:
    for key, value in _mapping(f"contexts.{name}", given).items():
        if key not in _FIELDS or not isinstance(value, str):
            raise ConfigError(f"contexts.{name}.{key}: has to be one of {', '.join(sorted(_FIELDS))}, with a text")
    return Context(name, **given)


def _mapping(where: str, given: Any) -> dict[Any, Any]:
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: has to be a mapping")
    return given
