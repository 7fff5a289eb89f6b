"""The options of the control plane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from outrider.configuration import Option, load
from outrider.process_config import ProcessConfig
from outrider.rpc.access.roles import ClusterSecret, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig(ProcessConfig):
    metadata_url: Annotated[str, Option("metadata", required=True)] = ""
    """Redis URL of the metadata store, with the leases, tenants and keys."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT for gRPC; port 0 lets the system choose."""
    secret: Annotated[ClusterSecret | None, Option("cluster_secret_file", read=ClusterSecret.read, secret=True)] = None
    """File with the secret of the cluster, from which the operator's token is derived. Without it, anybody who reaches
    the port may operate the cluster."""
    keys_required_file: str = ""
    """File that is made when the first API key is made, so that keys stay required where the metadata store has lost
    its data. Empty: this process alone remembers it."""
    drain_timeout_s: float = 1.0
    """Seconds after SIGTERM in which running calls may finish. Those that are left are then cut off."""

    role: ClassVar[Role] = Role.CONTROL

    def __post_init__(self) -> None:
        self.check_process()
        self.check_port(self.listen, "control.")


def parse_arguments(arguments: Sequence[str] | None = None) -> ControlConfig:
    """Of file, environment and command line. An impossible option ends the process with a message that names it."""
    return load(ControlConfig, "outrider_controller.control", "Control plane: the operator's API.", arguments)
