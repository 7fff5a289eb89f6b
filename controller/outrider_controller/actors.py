"""Routers and control plane as Ray actors: Ray starts them, and restarts them on the same port when they die.

Only this file and `cluster` import ray. Each actor serves gRPC on a port of its own, so Ray is not on the path of a
token.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import socket
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
import ray.exceptions
from outrider.rpc.access.roles import Role
from outrider.telemetry.logging import configure_logging

from outrider_controller.config import ControllerConfig, RayConfig, on_node
from outrider_controller.control.config import ControlConfig
from outrider_controller.control.server import RunningControl, control_process
from outrider_controller.private import scratch_directory
from outrider_controller.router.config import RouterConfig
from outrider_controller.router.process import RunningRouter, router_process

log = logging.getLogger(__name__)

C = TypeVar("C", ControlConfig, RouterConfig)


class StartError(Exception):
    """The controller could not start; the message says why."""


# Without raylet no actor is restarted; without gcs_server Ray ends itself after a minute.
_SERVERS = ("raylet", "gcs_server")
_WATCH_S = 0.2
_PARENT_POLL_S = 0.5
_STOP_MARGIN_S = 5.0
# A slow machine takes minutes; what fails is told at once.
_START_TIMEOUT_S = 240.0
# Names in log lines.
_NAMES = {Role.ROUTER: "router", Role.CONTROL: "control plane"}


class Actor:
    """A router or a control plane, for as long as the actor lives. The constructor starts everything, because Ray makes
    no other call to a restarted actor."""

    serve: Callable[[Any], AbstractAsyncContextManager[RunningRouter | RunningControl]]

    async def __init__(  # type: ignore[misc]
        self, config: RouterConfig | ControlConfig, log_path: str = "", at_node: bool = False
    ) -> None:
        """`at_node`: listens at the address of the node on which Ray starts it. Others find it by its lease, also after
        a restart on another node."""
        _configure_logging(config.role.value, config.log_format, log_path)
        self._stack = AsyncExitStack()
        self._watch = asyncio.create_task(_end_with_ray(alone=at_node))
        here = on_node(config, ray.util.get_node_ip_address()) if at_node else config
        self._running = await self._stack.enter_async_context(self.serve(here))
        _tell_if_restarted(f"{_NAMES[config.role]} at {self._running.address}")

    async def address(self) -> str:
        return self._running.address

    async def num_routers(self) -> int:
        """Of a control plane: routers that the load needs; 0 if not known here."""
        return self._running.demand.num_routers if isinstance(self._running, RunningControl) else 0

    async def stop(self) -> None:
        """Drains, then closes everything."""
        await self._stack.aclose()


# Ray names the processes after these classes.
class RouterActor(Actor):
    serve = staticmethod(router_process)


class ControlPlane(Actor):
    serve = staticmethod(control_process)


def _stderr_path() -> str:
    """The path by which an actor can open this process's stderr; empty where it cannot. Ray also forwards the actors'
    own stderr, but prefixes each line with the actor's name, so that it is not JSON any more."""
    if not sys.platform.startswith("linux"):
        return ""
    mode = os.fstat(2).st_mode
    # Two writers of a file overwrite each other unless both append.
    appends = stat.S_ISREG(mode) and fcntl.fcntl(2, fcntl.F_GETFL) & os.O_APPEND
    return f"/proc/{os.getpid()}/fd/2" if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or appends else ""


def _configure_logging(component: str, log_format: str, path: str) -> None:
    """Called in an actor. Its log lines go to `path`, if that can be opened."""
    stream = None
    with suppress(OSError):
        # Stays open for the life of the process.
        stream = open(path, "a", buffering=1) if path else None  # noqa: SIM115
    configure_logging(component, log_format, stream=stream)


async def _end_with_ray(*, alone: bool) -> None:
    """Ends an actor whose raylet has died: nothing would restart it, and the next actor needs its port.

    Not `alone`: with all that the raylet has started. Ray's agents would live for a minute, in which they try to tell a
    server that has died too."""
    raylet, siblings = os.getppid(), list[psutil.Process]()
    with suppress(psutil.Error):
        siblings = [] if alone else psutil.Process(raylet).children()
    while True:
        await asyncio.sleep(_PARENT_POLL_S)
        if os.getppid() != raylet:
            for one in siblings:
                with suppress(psutil.Error):
                    if one.pid != os.getpid():
                        one.kill()
            os._exit(1)


def _tell_if_restarted(name: str) -> None:
    """Called in an actor: logs whether this is a restart."""
    with warnings.catch_warnings():
        # Ray itself uses what it warns others not to use.
        warnings.simplefilter("ignore")
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
    if restarted:
        log.warning("%s died and was started again", name)


@contextmanager
def _ending_with_ray(directory: Path) -> Iterator[None]:
    """Ends this process when one of Ray's servers dies in the block; Ray itself would wait for a minute or forever."""
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(over, directory), name="ray-watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def _watch(over: threading.Event, directory: Path) -> None:
    servers: dict[str, psutil.Process] = {}
    while not over.wait(_WATCH_S):
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if (name := child.name()) in _SERVERS:
                    servers[name] = child
        if died := [name for name, server in servers.items() if not _lives(server)]:
            log.error("Ray's %s died: the controller ends, for only a new one can serve again", died[0])
            _abandon(directory)
            os._exit(1)


def _abandon(directory: Path) -> None:
    """Kills what is left of Ray and removes its files."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    shutil.rmtree(directory, ignore_errors=True)


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@dataclass(frozen=True, slots=True)
class Controller:
    router_addresses: tuple[str, ...]
    control_addresses: tuple[str, ...]

    def run(self, stopping: threading.Event) -> None:
        """Runs until `stopping`. Meanwhile Ray restarts actors that die."""
        for address in self.control_addresses:
            log.info("control plane at %s", address)
        for address in self.router_addresses:
            log.info("router at %s", address)
        stopping.wait()
        log.info("draining")


def drain(actors: Sequence[Any], drain_timeout_s: float) -> None:
    """All of them at the same time. Blocks."""
    try:
        ray.get([actor.stop.remote() for actor in actors], timeout=drain_timeout_s + _STOP_MARGIN_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        log.warning("not everything stopped in order: %s", type(error).__name__)


@contextmanager
def running_controller(config: ControllerConfig) -> Iterator[Controller]:
    """Starts Ray and the actors; drains and stops them at the end. Blocks while it starts. Raises StartError."""
    routers, controls, log_path = config.routers(), config.controls(), _stderr_path()
    with _local_ray(config.ray, len(routers) + len(controls)):
        supervised = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)
        # Routers first: when all have died, requests wait for the routers but need no plan.
        actors = [supervised(RouterActor).remote(_definite(one), log_path) for one in routers]
        actors += [supervised(ControlPlane).remote(_definite(one), log_path) for one in controls]
        addresses = addresses_of(actors)
        controller = Controller(tuple(addresses[: len(routers)]), tuple(addresses[len(routers) :]))
        try:
            yield controller
        finally:
            drain(actors, config.router.drain_timeout_s)


def addresses_of(actors: Sequence[Any]) -> list[str]:
    """Waits until all actors serve and returns their addresses. Raises StartError."""
    try:
        addresses: list[str] = ray.get([actor.address.remote() for actor in actors], timeout=_START_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        raise StartError(f"the actors did not start within {_START_TIMEOUT_S:g} s") from None
    except ray.exceptions.RayError as error:
        # Ray's message ends with the actor's own error.
        raise StartError(f"an actor did not start: {str(error).strip().splitlines()[-1]}") from None
    return addresses


@contextmanager
def _local_ray(config: RayConfig, num_actors: int) -> Iterator[None]:
    """A private Ray on the loopback interface, without dashboard, for the block. Raises StartError."""
    with ExitStack() as stack:
        try:
            private = stack.enter_context(scratch_directory(Path(config.temp_dir or f"/tmp/outrider-{os.geteuid()}")))
        except OSError as error:
            raise StartError(f"ray_temp_dir: {error}") from None
        # Ray writes a long text to stdout when an actor dies; we write nothing there.
        stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        stack.callback(_shut_down)
        stack.enter_context(_ending_with_ray(private))
        ray.init(
            address="local",
            # The number of processes that may start at once, so that restarts do not wait for one another.
            num_cpus=num_actors,
            num_gpus=0,
            # The actors do not use it.
            object_store_memory=80 << 20,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            # Ray makes this directory writable for everyone, so it is inside a private one.
            _temp_dir=str(private / "r"),
            configure_logging=False,
            log_to_driver=True,
            namespace="outrider",
        )
        yield


def _shut_down() -> None:
    """Of a Ray that had not started yet its own shutdown leaves the agents, for a minute."""
    family = psutil.Process().children(recursive=True)
    ray.shutdown()
    for one in family:
        with suppress(psutil.Error):
            one.kill()


def _definite(config: C) -> C:
    """Replaces port 0 by a free port: a restarted actor must keep its address."""
    return replace(config, listen=_free(config.listen), ops_listen=_free(config.ops_listen))


def _free(listen: str) -> str:
    host, _, port = listen.rpartition(":")
    if port != "0":
        return listen
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"
