"""Redis, a router, a control plane and a draft worker, each in a process of its own, for vLLM's own server."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.redis_server import EmbeddedServer
from tests.vllm.processes import free_address
from tests.vllm.vllm_serve import LONG, REPETITIVE, Server, until

ROUTER = "outrider_controller.router"


class Cluster:
    def __init__(self, url: str) -> None:
        self.router_address, self.control_address = free_address(), free_address()
        self._url = url
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", module, "--metadata", self._url, *arguments]
        self._processes[module] = subprocess.Popen(command)

    def start_router(self) -> None:
        self.start(ROUTER, "--listen", self.router_address)

    def kill(self, module: str) -> None:
        process = self._processes.pop(module)
        process.kill()
        process.wait()

    def stop(self) -> None:
        for module in list(self._processes):
            self.kill(module)

    def is_up(self) -> bool:
        """Whether the control plane answers."""
        return self._run(("get", "workers")).returncode == 0

    def ask(self, *words: str) -> Any:
        """What the command line prints."""
        done = self._run(words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def traces(self, request_id: str) -> list[Any]:
        """Of a request that has ended; empty until a router knows of that."""
        done = self._run(("trace", request_id))
        found = json.loads(done.stdout)["traces"] if done.returncode == 0 else []
        return [trace for trace in found if trace["state"] != "running"]

    def workers(self, role: str) -> list[Any]:
        rows: list[Any] = self.ask("get", "workers", "--role", role)["workers"]
        return rows

    def _run(self, words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "outrider_controller.cli", *words, "--control", self.control_address]
        return subprocess.run([*command, "-o", "json"], capture_output=True, text=True, timeout=1200)


@contextlib.contextmanager
def clustered(directory: Path, draft: Path | None) -> Iterator[Cluster]:
    """`draft`: the model of the draft worker, if there is one."""
    with EmbeddedServer.start(directory) as redis:
        made = Cluster(redis.url)
        try:
            made.start_router()
            made.start("outrider_controller.control", "--listen", made.control_address)
            unsure = "--min-confidence", "0", "--num-alternatives", "0"
            if draft is not None:
                made.start("outrider.draft", "--listen", "127.0.0.1:0", "--model", str(draft), *unsure)
            until(made.is_up)
            yield made
        finally:
            made.stop()


@contextlib.contextmanager
def answering(server: Server, tenant: str) -> Iterator[None]:
    """Within the block one answer of the tenant is always under way."""
    ended: list[bool] = []

    def answer() -> None:
        while not ended:
            server.answer(REPETITIVE, tenant=tenant, **LONG)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(answer)
        try:
            yield
        finally:
            ended.append(True)
        running.result()
