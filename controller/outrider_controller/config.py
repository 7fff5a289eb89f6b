"""The controller process: one frozen configuration, parsed once from the command line."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.metadata import MetadataStore
from outrider.telemetry.ops import ANY_LOOPBACK_PORT

from outrider_controller.control.config import ControlConfig
from outrider_controller.router.config import RouterConfig, add_shared_arguments, shared_options


@dataclass(frozen=True, slots=True)
class RayConfig:
    """The Ray that supervises the actors: small, on this machine, not reachable from outside it."""

    object_store_bytes: int = 80 << 20
    temp_dir: str = ""
    """In it lies, until the end, a directory with Ray's sockets and logs. Empty: one of this user under /tmp."""
    start_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        # Ray's sockets lie about 75 characters below it, and a socket's path has at most 107.
        if len(self.temp_dir) > 30:
            raise ValueError("ray_temp_dir: at most 30 characters")


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """One controller process and the actors it starts."""

    metadata_url: str
    routers: tuple[RouterConfig, ...] = (RouterConfig(),)
    control: ControlConfig = field(default_factory=ControlConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    log_format: str = "human"

    def __post_init__(self) -> None:
        if not self.metadata_url:
            raise ValueError("metadata: a URL is needed; workers are found through it")
        if not self.routers:
            raise ValueError("routers: at least 1")
        if len({router.cache_salt_key for router in self.routers}) > 1:
            raise ValueError("cache_salt_key: must be the same for all routers, or they share no cached prefix")


def parse_arguments(arguments: Sequence[str] | None = None) -> ControllerConfig:
    """Reads the command line. An unknown or impossible option ends the process with a message that names it."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return _config(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _config(options: argparse.Namespace) -> ControllerConfig:
    # Says what is wrong with the URL; connects to nothing yet.
    MetadataStore.connect(options.metadata)
    listens = options.router_listen or ["127.0.0.1:0"] * (options.routers or 1)
    if options.routers is not None and options.routers != len(listens):
        raise ValueError(f"routers: {options.routers} asked for, {len(listens)} addresses given with --router-listen")
    advertised = _one_each("router_advertise", options.router_advertise, len(listens), "")
    ops = _one_each("router_ops_listen", options.router_ops_listen, len(listens), ANY_LOOPBACK_PORT)
    shared = shared_options(options)
    # Drawn here, so that all routers of this process share cached prefixes.
    shared["cache_salt_key"] = shared["cache_salt_key"] or secrets.token_bytes(32)
    process = {"metadata_url": options.metadata, "log_format": options.log_format}
    routers = [
        RouterConfig(listen=listen, advertise=advertise, ops_listen=ops_listen, **process, **shared)
        for listen, advertise, ops_listen in zip(listens, advertised, ops, strict=True)
    ]
    control = ControlConfig(
        listen=options.control_listen,
        advertise=options.control_advertise,
        ops_listen=options.control_ops_listen,
        **{name: shared[name] for name in ("tls_dir", "insecure", "secret")},
        **process,
    )
    return ControllerConfig(
        metadata_url=options.metadata,
        routers=tuple(routers),
        control=control,
        ray=RayConfig(temp_dir=options.ray_temp_dir),
        log_format=options.log_format,
    )


def _one_each(name: str, given: list[str], num_routers: int, otherwise: str) -> list[str]:
    """One address per router. Raises ValueError when there are more or fewer."""
    if given and len(given) != num_routers:
        raise ValueError(f"{name}: {len(given)} addresses given for {num_routers} routers")
    return given or [otherwise] * num_routers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider_controller",
        description="Controller: router actors and the control plane, supervised by Ray on this machine.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--metadata", required=True, metavar="URL", help="metadata store in which workers are found")
    add("--routers", type=int, default=None, metavar="N", help="router actors; 1, or one per --router-listen")
    add("--router-listen", action="append", default=[], metavar="HOST:PORT", help="a router's address; may be repeated")
    add(
        "--router-advertise",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="where gateways reach a router; one per router, in their order; the bound addresses if not given",
    )
    add(
        "--router-ops-listen",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a router's health, metrics and options; one per router, in their order; a free port if not given",
    )
    add("--control-ops-listen", default=ANY_LOOPBACK_PORT, metavar="HOST:PORT", help="the same of the control plane")
    add("--control-listen", default="127.0.0.1:0", metavar="HOST:PORT", help="address of the control API")
    add("--control-advertise", default="", metavar="HOST:PORT", help="where operators reach it; the bound one if empty")
    add("--ray-temp-dir", default="", metavar="DIR", help="Ray's sockets and logs lie in it")
    add_shared_arguments(parser)
    return parser
