"""What the control plane can be told."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.address import check_advertised
from outrider.rpc.roles import ClusterSecret
from outrider.telemetry.ops import ANY_LOOPBACK_PORT


@dataclass(frozen=True, slots=True)
class ControlConfig:
    listen: str = "127.0.0.1:0"
    """HOST:PORT; port 0 lets the system choose."""
    advertise: str = ""
    """HOST:PORT under which operators reach it; empty takes the bound address."""
    ops_listen: str = ANY_LOOPBACK_PORT
    """HOST:PORT for operators' tools, in plain HTTP; empty means none."""
    secret: ClusterSecret | None = None
    """From which the operator's token follows. None: everybody who reaches the port may operate."""

    def __post_init__(self) -> None:
        check_advertised("control.advertise", self.advertise, self.listen)
