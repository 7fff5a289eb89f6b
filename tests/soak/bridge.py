"""Network namespaces on one bridge: machines, as far as the network goes. Needs root, and Debian's iproute2."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass


def why_not(*programs: str) -> str:
    """What this machine lacks for it, and of these programs; empty where it lacks nothing."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if missing := [name for name in ("ip", *programs) if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)} (Debian: iproute2, nftables)"
    probe = f"outrider-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "the system lets nobody make network namespaces here"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return ""


def run(*command: str, given: str = "") -> str:
    """Its output. Raises CalledProcessError."""
    return subprocess.run(command, check=True, input=given, text=True, capture_output=True).stdout


@dataclass(frozen=True, slots=True)
class Bridge:
    """A namespace for each name. This process is outside of all, and reaches all."""

    names: tuple[str, ...]
    subnet: str
    _device: str

    @classmethod
    @contextmanager
    def made(cls, names: Sequence[str]) -> Iterator[Bridge]:
        """Raises CalledProcessError. What still runs in a namespace at the end is killed."""
        # Others may make one on this machine at the same time.
        pid = os.getpid()
        bridge = cls(tuple(names), f"10.{100 + pid % 100}.{pid // 100 % 250}", f"or{pid % 1_000_000}")
        with ExitStack() as stack:
            run("ip", "link", "add", bridge._device, "type", "bridge")
            stack.callback(run, "ip", "link", "delete", bridge._device)
            run("ip", "address", "add", f"{bridge.outside}/24", "dev", bridge._device)
            run("ip", "link", "set", bridge._device, "up")
            for number, name in enumerate(bridge.names):
                run("ip", "netns", "add", bridge._namespace(name))
                stack.callback(run, "ip", "netns", "delete", bridge._namespace(name))
                stack.callback(bridge.kill_all, name)
                outer = f"{bridge._device}v{number}"
                bridge._connect(name, outer)
                # The kernel removes it some time after its namespace, and the next bridge uses its name.
                stack.callback(run, "ip", "link", "delete", outer)
            yield bridge

    @property
    def outside(self) -> str:
        """The address of this process."""
        return f"{self.subnet}.1"

    def address(self, name: str) -> str:
        return f"{self.subnet}.{self.names.index(name) + 2}"

    def command(self, name: str, argv: Sequence[str]) -> tuple[str, ...]:
        """What runs `argv` in that namespace."""
        return ("ip", "netns", "exec", self._namespace(name), *argv)

    def kill_all(self, name: str) -> None:
        """Whatever runs there, as when a machine fails."""
        for pid in run("ip", "netns", "pids", self._namespace(name)).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _namespace(self, name: str) -> str:
        return f"{self._device}-{name}"

    def _connect(self, name: str, outer: str) -> None:
        inner, namespace = "eth0", self._namespace(name)
        run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", namespace)
        run("ip", "link", "set", outer, "master", self._device, "up")
        run("ip", "-n", namespace, "address", "add", f"{self.address(name)}/24", "dev", inner)
        for device in ("lo", inner):
            run("ip", "-n", namespace, "link", "set", device, "up")
