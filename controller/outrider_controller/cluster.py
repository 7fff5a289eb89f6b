"""Routers and control plane on an existing Ray cluster: spread over its nodes, and independent of this process.

The actors are detached and named, so a restarted controller finds them. A name contains a hash of version and
configuration: another configuration or version gets actors of its own, and then the old ones are drained. Imports ray,
as `actors` does.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import ray
import ray.exceptions
from outrider.protocol.identity import package_version

from outrider_controller.actors import ControlPlane, RouterActor, StartError, addresses_of, drain
from outrider_controller.config import ControllerConfig

log = logging.getLogger(__name__)

_NAMESPACE = "outrider"
# Ray places actors by the resources they need: with none, all might go to one node.
_CPUS = 0.01
_RESIZE_S = 2.0
_ASK_S = 5.0
_MAX_ROUTERS = 64


class ClusterController:
    """The actors of this configuration, and their number of routers."""

    def __init__(self, config: ControllerConfig) -> None:
        self._drain_timeout_s = config.router.drain_timeout_s
        self._min_routers = config.num_routers or 1
        self._router, self._controls = config.routers()[0], config.controls()
        given = pickle.dumps((package_version(), self._router, self._controls))
        self._digest = hashlib.sha256(given).hexdigest()[:12]
        self.num_routers = 0

    def start(self) -> None:
        """Finds or starts the actors, then stops those of other configurations. Blocks. Raises StartError."""
        for address in addresses_of(self._control_planes()):
            log.info("control plane at %s", address)
        # Routers outlive a controller: those that the load needs are kept.
        self.resize(max(self._min_routers, min(self.num_wanted(), _MAX_ROUTERS)))
        stop([name for name in ray.util.list_named_actors() if self._digest not in name], self._drain_timeout_s)

    def run(self, stopping: threading.Event) -> None:
        """Runs until `stopping`. Meanwhile Ray restarts actors that die."""
        follow(self, self._min_routers, stopping)
        log.info("routers and control planes go on")

    def resize(self, num_routers: int) -> None:
        """Starts routers, or drains surplus ones. Blocks. Raises StartError."""
        names = [self._name(f"router-{number}") for number in range(num_routers)]
        actors = [self._actor(RouterActor, self._router, f"router-{number}") for number in range(num_routers)]
        for address in addresses_of(actors)[self.num_routers :]:
            log.info("router at %s", address)
        self.num_routers = num_routers
        ours = [name for name in ray.util.list_named_actors() if name.endswith(self._digest)]
        stop([name for name in ours if name.startswith("router-") and name not in names], self._drain_timeout_s)

    def num_wanted(self) -> int:
        """Routers that the load needs, from the leading control plane; 0 if none leads. Blocks."""
        try:
            # Found and not started: another controller may have ended them.
            found = [ray.get_actor(self._name(f"control-{number}")) for number in range(len(self._controls))]
            asked = [one.num_routers.remote() for one in found]
            answered, _ = ray.wait(asked, num_returns=len(asked), timeout=_ASK_S)
        except (ray.exceptions.RayError, ValueError):
            return 0
        return max((self._answer(one) for one in answered), default=0)

    def _answer(self, answered: Any) -> int:
        try:
            return int(ray.get(answered, timeout=_ASK_S))
        except (ray.exceptions.RayError, TimeoutError):
            return 0

    def _control_planes(self) -> list[Any]:
        return [self._actor(ControlPlane, one, f"control-{number}") for number, one in enumerate(self._controls)]

    def _name(self, what: str) -> str:
        return f"{what}-{self._digest}"

    def _actor(self, kind: type[RouterActor] | type[ControlPlane], config: object, what: str) -> Any:
        options = {"name": self._name(what), "lifetime": "detached", "get_if_exists": True}
        supervised = ray.remote(num_cpus=_CPUS, max_restarts=-1, max_task_retries=0)(kind)
        return supervised.options(**options, scheduling_strategy="SPREAD").remote(config, at_node=True)


def stop(names: Sequence[str], drain_timeout_s: float) -> None:
    """Drains these actors and ends them. Blocks."""
    actors = []
    for name in names:
        with suppress(ValueError):
            actors.append(ray.get_actor(name))
    drain(actors, drain_timeout_s)
    for actor in actors:
        ray.kill(actor, no_restart=True)


@contextmanager
def joined_controller(config: ControllerConfig) -> Iterator[ClusterController]:
    """Starts the actors, which keep running after the block: the next controller finds them. Raises StartError."""
    with _joined(config):
        controller = ClusterController(config)
        controller.start()
        yield controller


def stop_actors(config: ControllerConfig) -> None:
    """Ends all routers and control planes on the cluster, of all controllers. Blocks. Raises StartError."""
    with _joined(config):
        stop(ray.util.list_named_actors(), config.router.drain_timeout_s)


@contextmanager
def _joined(config: ControllerConfig) -> Iterator[None]:
    try:
        ray.init(address=config.ray.address, namespace=_NAMESPACE, configure_logging=False, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise StartError(f"ray_address: {config.ray.address}: {str(error).splitlines()[0]}") from None
    try:
        yield
    finally:
        ray.shutdown()


def follow(
    controller: ClusterController, min_routers: int, stopping: threading.Event, every_s: float = _RESIZE_S
) -> None:
    """Keeps as many routers as the load needs until `stopping`, and at least `min_routers`.

    While the need is not known the number stays. A cluster that does not answer is asked again.
    """
    while not stopping.wait(every_s):
        wanted = controller.num_wanted() or controller.num_routers
        if (wanted := max(min_routers, min(wanted, _MAX_ROUTERS))) == controller.num_routers:
            continue
        try:
            controller.resize(wanted)
        except (StartError, ray.exceptions.RayError) as error:
            log.warning("%d routers are wanted, %d run: %s", wanted, controller.num_routers, error)
