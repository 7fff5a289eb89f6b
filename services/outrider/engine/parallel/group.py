"""One process's place in a tensor-parallel group, from rendezvous to the last step."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.engine.config import EngineConfig
from outrider.engine.memory import available_bytes
from outrider.engine.parallel.links import Kind, Link, PeerGone
from outrider.engine.parallel.plan import encode
from outrider.engine.parallel.sharding import (
    check_device,
    check_divides,
    check_execution,
    rank_device,
    sharding_arguments,
)
from outrider.engine.parallel.watchdog import Watchdog, end_process
from outrider.engine.step import Step

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_RENDEZVOUS_TIMEOUT = timedelta(seconds=300)
_STOP_TIMEOUT_S = 5.0
_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank inherits from the process that starts it."""

    rank: int
    size: int
    links: tuple[Link, ...]
    """On rank 0, one to each follower, in order of rank. On a follower, the one to rank 0."""
    rendezvous: socket.socket
    """A listening socket, for the group store of rank 0."""
    beat_fd: int
    step_timeout_s: float

    def __reduce__(self) -> tuple[Any, ...]:
        """For the process that is being started: a number alone would be no open descriptor there."""
        beat = DupFd(self.beat_fd)
        return _inherited, (beat, self.rank, self.size, self.links, self.rendezvous, self.step_timeout_s)


def _inherited(
    beat: Any, rank: int, size: int, links: tuple[Link, ...], rendezvous: socket.socket, step_timeout_s: float
) -> Place:
    return Place(rank, size, links, rendezvous, beat.detach(), step_timeout_s)


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Rank 0's decisions before anything is loaded."""

    path: Path
    num_blocks: int

    def encode(self) -> bytes:
        return json.dumps({"path": str(self.path), "num_blocks": self.num_blocks}).encode()

    @classmethod
    def decode(cls, data: bytes) -> LoadOrder:
        fields = json.loads(data)
        return cls(Path(fields["path"]), int(fields["num_blocks"]))


class Group:
    """One rank's part in the group. Used by the loading thread, then by the step thread."""

    def __init__(self, place: Place) -> None:
        self.rank = place.rank
        self.size = place.size
        self.links = place.links
        names = [f"rank {rank}" for rank in range(1, self.size)] if self.leads else ["rank 0"]
        peers = {link.fileno(): name for link, name in zip(self.links, names, strict=True)}
        self.watchdog = Watchdog(peers, place.beat_fd, place.step_timeout_s)
        self._place = place
        self._device = torch.device("cpu")

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def check(self, path: Path, settings: Any, config: EngineConfig) -> None:
        """Raises CheckpointError for a model that cannot be sharded, or a machine with too few GPUs."""
        check_divides(path, settings, self.size)
        check_execution(config.execution)
        check_device(config.device, self.size)

    def device(self, device: str) -> str:
        """This rank's device."""
        return rank_device(device, self.rank)

    def available_bytes(self, device: str) -> int:
        """Bytes that this rank may take. On a CPU all ranks share the memory; rank 0 measures it before any has
        loaded."""
        shared = torch.device(device).type == "cpu" and self.leads
        return available_bytes(device) // (self.size if shared else 1)

    def join(self, order: LoadOrder, device: str) -> None:
        """Rank 0 sends the order to the followers; then all form the process group. Raises PeerGone, or RuntimeError
        when that fails."""
        if self.leads:
            for link in self.links:
                link.send(Kind.LOAD, order.encode())
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        # transformers reads its place in the mesh from these.
        os.environ |= {"RANK": str(self.rank), "LOCAL_RANK": str(self.rank), "WORLD_SIZE": str(self.size)}
        # Ranks of one machine must not be reachable from others.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._meet()

    def sharding(self) -> dict[str, Any]:
        """Arguments of from_pretrained."""
        return sharding_arguments(self.size)

    def loaded(self) -> None:
        """On rank 0, returns when all ranks have loaded. Raises PeerGone."""
        if not self.leads:
            self.links[0].send(Kind.READY)
            return
        for link in self.links:
            kind, _ = link.receive()
            if kind is not Kind.READY:
                raise PeerGone(f"said {kind.name} instead of READY")

    @contextmanager
    def run(self, step: Step) -> Iterator[None]:
        """Wraps every forward of every rank. Rank 0 first sends the step to the others. A rank that fails inside ends
        its process.

        A rank that failed alone and continued would leave the others inside a collective, with caches unlike its own.
        """
        with self.watchdog.step():
            try:
                if self.leads:
                    plan = encode(step)
                    for link in self.links:
                        link.send(Kind.STEP, plan)
                yield
                if self._device.type == "cuda":
                    # A collective that hangs on a GPU is only noticed by waiting for it: here, under the watchdog.
                    torch.cuda.current_stream(self._device).synchronize()
            except Exception as error:
                log.error("rank %d failed in a step", self.rank, exc_info=error)
                end_process(f"rank {self.rank}: {type(error).__name__}")

    def stop(self) -> None:
        """Called on rank 0 at its end: it ends the followers too."""
        self.watchdog.disarm()
        for link in self.links:
            try:
                link.send(Kind.STOP)
            except PeerGone:
                continue
        for link in self.links:
            if not link.wait_until_gone(_STOP_TIMEOUT_S):
                log.warning("a follower does not end")

    def _meet(self) -> None:
        import torch.distributed as dist

        dist.init_process_group(
            _BACKENDS[self._device.type],
            store=self._store(),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self._place.step_timeout_s),
            device_id=self._device if self._device.type == "cuda" else None,
        )

    def _store(self) -> Store:
        from torch._C._distributed_c10d import TCPStore

        rendezvous = self._place.rendezvous
        host, port = rendezvous.getsockname()
        return TCPStore(
            host,
            port,
            self.size,
            self.leads,
            _RENDEZVOUS_TIMEOUT,
            wait_for_workers=False,
            # The store of rank 0 takes ownership of the descriptor.
            master_listen_fd=os.dup(rendezvous.fileno()) if self.leads else None,
            use_libuv=True,
        )


def listen() -> socket.socket:
    """A listening socket for the rendezvous. Made before the ranks, so that no other process can take the port."""
    rendezvous = socket.socket()
    rendezvous.bind((_HOST, 0))
    rendezvous.listen()
    return rendezvous
