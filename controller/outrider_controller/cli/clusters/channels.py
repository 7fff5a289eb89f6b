"""Connections of commands: to the cluster with an operator's certificate, to a gateway with TLS, where asked for.

OUTRIDER_TLS_DIR names a directory with tls.crt, tls.key and ca.crt of an operator. OUTRIDER_GATEWAY_CA names a file
with the authority of the gateway's certificate, or is `system` for those that this machine trusts. Where they are not
set, the context has them.
"""

from __future__ import annotations

import os
from pathlib import Path

import grpc
from outrider.rpc.access.certificates import TlsFiles
from outrider.rpc.access.roles import Role
from outrider.rpc.channel import connect_to, create_channel

from outrider_controller.cli.clusters import contexts


def cluster_channel(role: Role, address: str) -> grpc.aio.Channel:
    """To the control plane or a router. Raises OSError when the files cannot be read."""
    context = contexts.meant()
    # A router is of the cluster whose control plane is asked, and has to prove it.
    named = context.cluster if context is not None and role is Role.ROUTER else contexts.cluster_at(control=address)
    tls_dir = os.environ.get("OUTRIDER_TLS_DIR") or named.tls_dir
    return connect_to(role, TlsFiles(Path(tls_dir).expanduser()) if tls_dir else None)(address)


def gateway_channel(address: str) -> grpc.aio.Channel:
    """To public gRPC. Raises OSError when the file cannot be read."""
    named = contexts.cluster_at(gateway=address)
    authority = os.environ.get("OUTRIDER_GATEWAY_CA") or named.gateway_ca
    if not authority:
        return create_channel(address)
    trusted = None if authority == "system" else Path(authority).expanduser().read_bytes()
    credentials = grpc.ssl_channel_credentials(trusted)
    return create_channel(address, credentials=credentials, server_name=named.server_name)
