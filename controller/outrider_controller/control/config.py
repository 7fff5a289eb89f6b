"""What the control plane can be told."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.address import check_advertised
from outrider.metadata import MetadataStore
from outrider.rpc.certificates import TlsFiles, check_plain, cluster_tls
from outrider.rpc.roles import ClusterSecret, Role
from outrider.telemetry.logging import LOG_FORMATS
from outrider.telemetry.ops import ANY_LOOPBACK_PORT


@dataclass(frozen=True, slots=True)
class ControlConfig:
    listen: str = "127.0.0.1:0"
    """HOST:PORT; port 0 lets the system choose."""
    advertise: str = ""
    """HOST:PORT under which operators reach it; empty takes the bound address."""
    ops_listen: str = ANY_LOOPBACK_PORT
    """HOST:PORT for operators' tools, in plain HTTP; empty means none."""
    tls_dir: str = ""
    """Directory with `tls.crt`, `tls.key` and `ca.crt` of a control plane; empty serves in plain text."""
    insecure: bool = False
    """Serve in plain text also where other machines can reach it."""
    secret: ClusterSecret | None = None
    """From which the operator's token follows. None: everybody who reaches the port may operate."""
    metadata_url: str = ""
    """Where the leases are; empty where whoever runs the control plane has the store open."""
    log_format: str = "human"

    def __post_init__(self) -> None:
        check_advertised("control.advertise", self.advertise, self.listen)
        check_plain("control.listen", self.listen, self.tls_dir, self.insecure)
        cluster_tls(Role.CONTROL, self.tls_dir)

    @property
    def tls(self) -> TlsFiles | None:
        return TlsFiles(Path(self.tls_dir)) if self.tls_dir else None


def parse_arguments(arguments: Sequence[str] | None = None) -> ControlConfig:
    """Reads the command line. An unknown or impossible option ends the process with a message that names it."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        # Says what is wrong with the URL; connects to nothing yet.
        MetadataStore.connect(options.metadata)
        return ControlConfig(
            listen=options.listen,
            advertise=options.advertise,
            ops_listen=options.ops_listen,
            tls_dir=options.tls_dir,
            insecure=options.insecure,
            secret=ClusterSecret.read(options.cluster_secret_file) if options.cluster_secret_file else None,
            metadata_url=options.metadata,
            log_format=options.log_format,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider_controller.control",
        description="Control plane: the operator's API.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--metadata", required=True, metavar="URL", help="metadata store with the leases, tenants and keys")
    add("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="gRPC address; port 0 lets the system choose")
    add("--advertise", default="", metavar="HOST:PORT", help="where operators reach it; the bound one if empty")
    add("--ops-listen", default=ANY_LOOPBACK_PORT, metavar="HOST:PORT", help="health, metrics, options; none if empty")
    add("--tls-dir", default="", metavar="DIR", help="has tls.crt, tls.key and ca.crt; plain text if empty")
    add("--insecure", action="store_true", help="plain text also where other machines can reach it")
    add("--cluster-secret-file", default="", metavar="FILE", help="from which the operator's token follows")
    add("--log-format", default="human", choices=LOG_FORMATS, help="of the lines on stderr")
    return parser
