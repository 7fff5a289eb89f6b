"""The controller process: Ray, with routers and a control plane as its actors."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from outrider.address import AUTO, check_address, is_loopback, takes_all_interfaces
from outrider.configuration import Nested, Option, load
from outrider.telemetry.ops import ANY_LOOPBACK_PORT

from outrider_controller.control.config import ControlConfig
from outrider_controller.router.config import RouterConfig


def on_node(config: RouterConfig | ControlConfig, host: str) -> RouterConfig | ControlConfig:
    """The configuration of an actor on a Ray cluster: the host is replaced by the address of its node."""
    return replace(config, listen=f"{host}:{config.listen.rpartition(':')[2]}")


@dataclass(frozen=True, slots=True)
class RayConfig:
    """The Ray that supervises the actors. Without `address` a small one on this machine, not reachable from outside."""

    address: str = ""
    """HOST:PORT of a Ray cluster to join; this machine has to be one of its nodes. Empty: start a local Ray."""
    temp_dir: str = ""
    """Directory in which Ray keeps its sockets and logs while it runs. Empty: one of this user under /tmp."""
    stop_actors: bool = False
    """Start nothing: drain and stop the routers and control planes on the Ray cluster, then exit."""

    def __post_init__(self) -> None:
        # The paths of Ray's sockets are about 75 characters longer, and a socket's path has at most 107.
        if len(self.temp_dir) > 30:
            raise ValueError("ray_temp_dir: at most 30 characters")
        if self.address:
            check_address("ray_address", self.address)
        elif self.stop_actors:
            raise ValueError("ray_stop_actors: needs ray_address: elsewhere they end with their controller")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """One controller process and the actors it starts."""

    router: Annotated[RouterConfig, Nested(without=("listen", "advertise", "ops_listen"))] = field(
        default_factory=RouterConfig
    )
    num_routers: Annotated[int | None, Option("routers")] = None
    """Router actors. Not given: one per `router_listen`, or one."""
    router_listen: tuple[str, ...] = ()
    """HOST:PORT for gRPC of each router, in their order. Not given: free ports of the loopback interface."""
    router_advertise: tuple[str, ...] = ()
    """HOST:PORT under which gateways reach each router, or auto. Not given: the addresses that they listen on."""
    router_ops_listen: tuple[str, ...] = ()
    """HOST:PORT for operators' tools of each router. Not given: free ports of the loopback interface."""
    num_control_planes: Annotated[int | None, Option("control_planes")] = None
    """Control plane actors. One leads; another takes over within 3 s. Not given: 2 on a Ray cluster, else 1."""
    control_listen: str = "127.0.0.1:0"
    """HOST:PORT for gRPC of the first control plane. Further ones listen on free ports of the same host."""
    control_advertise: str = ""
    """HOST:PORT under which others reach the first control plane, or auto. Empty: the address that it listens on."""
    control_ops_listen: str = ANY_LOOPBACK_PORT
    """HOST:PORT for operators' tools of the first control plane; of further ones a free loopback port. Empty: none."""
    keys_required_file: str = ""
    """File that is made when the first API key is made, so that keys stay required where the metadata store has lost
    its data. Empty: the control plane alone remembers it."""
    ray: Annotated[RayConfig, Nested("ray_")] = field(default_factory=RayConfig)

    def __post_init__(self) -> None:
        if self.num_routers is not None and self.num_routers < 1:
            raise ValueError("routers: at least 1")
        if self.num_control_planes is not None and self.num_control_planes < 1:
            raise ValueError("control_planes: at least 1")
        if self.ray.address and not self.ray.stop_actors:
            self._check_cluster()
        self.routers()
        self.controls()

    def _check_cluster(self) -> None:
        if self.router_listen or self.router_advertise or self.router_ops_listen:
            raise ValueError(
                "router_listen: on a Ray cluster each listens on its own node; give only `routers`, their number"
            )
        if not self.router.cache_salt_key:
            raise ValueError("cache_salt_key_file: needed with ray_address: all routers have to have the same")
        if not (self.router.tls_dir or self.router.insecure):
            raise ValueError(
                "ray_address: routers and control plane listen at their nodes' addresses, which other machines can"
                " reach: give tls_dir, or insecure for plain text"
            )

    @property
    def log_format(self) -> str:
        return self.router.log_format

    def routers(self) -> tuple[RouterConfig, ...]:
        """Each router's configuration. On one machine without a given salt key, all get the same random one."""
        listens = self.router_listen or ("127.0.0.1:0",) * (self.num_routers or 1)
        if self.num_routers not in (None, len(listens)):
            raise ValueError(f"routers: {self.num_routers} asked for, but {len(listens)} addresses in router_listen")
        advertised = _one_each("router_advertise", self.router_advertise, len(listens), "")
        ops = _one_each("router_ops_listen", self.router_ops_listen, len(listens), ANY_LOOPBACK_PORT)
        shared = self.router
        if all(is_loopback(listen) for listen in listens):
            shared = replace(shared, cache_salt_key=shared.cache_salt_key or secrets.token_bytes(32))
        return tuple(
            replace(shared, listen=listen, advertise=advertise, ops_listen=ops_listen)
            for listen, advertise, ops_listen in zip(listens, advertised, ops, strict=True)
        )

    def controls(self) -> tuple[ControlConfig, ...]:
        first, count = self._first_control(), self.num_control_planes or (2 if self.ray.address else 1)
        return (first, *(_further(first) for _ in range(count - 1)))

    def _first_control(self) -> ControlConfig:
        return ControlConfig(
            listen=self.control_listen,
            advertise=self.control_advertise,
            ops_listen=self.control_ops_listen,
            metadata_url=self.router.metadata_url,
            tls_dir=self.router.tls_dir,
            insecure=self.router.insecure,
            secret=self.router.secret,
            keys_required_file=self.keys_required_file,
            log_format=self.router.log_format,
        )


def parse_arguments(arguments: Sequence[str] | None = None) -> ControllerConfig:
    """Of file, environment and command line. An impossible option ends the process with a message that names it."""
    about = "Controller: router actors and the control plane, supervised by Ray on this machine."
    return load(ControllerConfig, "outrider_controller", about, arguments)


def _further(control: ControlConfig) -> ControlConfig:
    """The configuration of a further control plane."""
    return replace(
        control,
        listen=f"{control.listen.rpartition(':')[0]}:0",
        advertise=AUTO if takes_all_interfaces(control.listen) else "",
        ops_listen=control.ops_listen and ANY_LOOPBACK_PORT,
    )


def _one_each(name: str, given: tuple[str, ...], num_routers: int, otherwise: str) -> tuple[str, ...]:
    """One address per router. Raises ValueError when there are more or fewer."""
    if given and len(given) != num_routers:
        raise ValueError(f"{name}: {len(given)} addresses given for {num_routers} routers")
    return given or (otherwise,) * num_routers
