"""The options of every process: how others reach it, what it logs, how it ends.

Each process's own class adds the rest.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from outrider.address import AUTO, check_advertised, check_listen, is_loopback, takes_all_interfaces
from outrider.configuration import Option
from outrider.metadata import MetadataStore
from outrider.metadata.connection.network import address_towards, has_host, is_elsewhere
from outrider.rpc.access.certificates import TlsFiles, check_plain, cluster_tls
from outrider.rpc.access.roles import Role
from outrider.telemetry.logging import check_log_format
from outrider.telemetry.ops import ANY_LOOPBACK_PORT

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    advertise: str = ""
    """HOST:PORT that this process publishes for others. auto: if it listens on all interfaces, the address of the
    interface towards the metadata store. Empty: the address that it listens on."""
    metadata_url: Annotated[str, Option("metadata")] = ""
    """Redis URL of the metadata store, in which processes find each other. Empty: none."""
    tls_dir: str = ""
    """Directory with `tls.crt`, `tls.key` and `ca.crt` of this role, for connections within the cluster. Empty: plain
    text."""
    insecure: bool = False
    """Allow plain text on a port that other machines can reach."""
    ops_listen: str = ANY_LOOPBACK_PORT
    """HOST:PORT for operators' tools, in plain HTTP: health, metrics, options. Empty: none."""
    drain_timeout_s: float = 30.0
    """Seconds after SIGTERM in which running work may finish. What is left is then handed back or cut off."""
    log_format: str = "auto"
    """Format of the log on stderr: json or human. auto: human on a terminal, json elsewhere."""

    role: ClassVar[Role]

    @property
    def tls(self) -> TlsFiles | None:
        return TlsFiles(Path(self.tls_dir), self.role) if self.tls_dir else None

    def advertised(self, bound: str) -> str:
        """The advertised HOST:PORT of a process that listens at `bound`. Raises OSError when `auto` finds no address.
        Resolves the metadata store's name with DNS."""
        address = bound if self.advertise == AUTO else self.advertise or bound
        if takes_all_interfaces(address):
            address = f"{address_towards(self.metadata_url)}:{bound.rpartition(':')[2]}"
        if is_loopback(address) and is_elsewhere(self.metadata_url):
            # Not an error if all processes are on this machine, and only the store is not.
            log.warning("advertise: %s is reached from this machine alone; the metadata store is elsewhere", address)
        return address

    def check_process(self) -> None:
        """Raises ValueError, naming the field, for values that are invalid in every process."""
        if self.ops_listen:
            check_listen("ops_listen", self.ops_listen)
        if self.metadata_url:
            # Only parses the URL, to raise its errors; does not connect.
            MetadataStore.connect(self.metadata_url)
        # Written so that NaN fails too.
        if not self.drain_timeout_s >= 0:
            raise ValueError(f"drain_timeout_s: must not be negative, got {self.drain_timeout_s:g}")
        check_log_format(self.log_format)
        cluster_tls(self.role, self.tls_dir)

    def check_port(self, listen: str, prefix: str = "") -> None:
        """Checks the port that the cluster's processes call. Raises ValueError that names the field, with `prefix`."""
        check_listen(f"{prefix}listen", listen)
        if self.metadata_url:
            self.check_reached(f"{prefix}advertise", listen)
        check_plain(f"{prefix}listen", listen, self.tls_dir, self.insecure)

    def check_reached(self, field: str, listen: str) -> None:
        """Checks that others can reach `listen` as `advertise` gives it. Raises ValueError that names the field."""
        check_advertised(field, self.advertise, listen)
        if self.advertise == AUTO and takes_all_interfaces(listen) and not has_host(self.metadata_url):
            raise ValueError(f"{field}: auto finds no address, for the metadata store is not reached over a network")
