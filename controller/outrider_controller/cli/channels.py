"""Connections of commands: to the cluster with an operator's certificate, to a gateway with TLS, where asked for.

OUTRIDER_TLS_DIR names a directory with tls.crt, tls.key and ca.crt of an operator. OUTRIDER_GATEWAY_CA names a file
with the authority of the gateway's certificate, or is `system` for those that this machine trusts.
"""

from __future__ import annotations

import os
from pathlib import Path

import grpc
from outrider.rpc.certificates import TlsFiles
from outrider.rpc.channel import connect_to, create_channel
from outrider.rpc.roles import Role


def cluster_channel(role: Role, address: str) -> grpc.aio.Channel:
    """To the control plane or a router. Raises OSError when the files cannot be read."""
    tls_dir = os.environ.get("OUTRIDER_TLS_DIR", "")
    return connect_to(role, TlsFiles(Path(tls_dir)) if tls_dir else None)(address)


def gateway_channel(address: str) -> grpc.aio.Channel:
    """To public gRPC. Raises OSError when the file cannot be read."""
    authority = os.environ.get("OUTRIDER_GATEWAY_CA", "")
    if not authority:
        return create_channel(address)
    trusted = None if authority == "system" else Path(authority).read_bytes()
    return create_channel(address, credentials=grpc.ssl_channel_credentials(trusted))
