"""A whole stack before a store that lies: no process ends, every request is answered, and then all is as it was."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest
from outrider.testing.tiny import tiny_checkpoint
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig

from tests.redis_server import EmbeddedServer
from tests.soak.lying_store import lying_store

_LIE_S = 15.0
_ANSWER_S = 30.0
"""A request waits for a target that is away, and is told so then."""


async def ask(http: httpx.AsyncClient, stack: Stack, number: int) -> tuple[int, str]:
    options = {"model": stack.config.model, "prompt": "Once", "max_tokens": 8, "temperature": 0}
    # Every other one has a key that nobody made: the store is asked about it.
    headers = {"Authorization": f"Bearer ork_{number}"} if number % 2 else {}
    answer = await http.post(f"http://{stack.gateway_http}/v1/completions", json=options, headers=headers)
    body = answer.json()
    return answer.status_code, body["choices"][0]["text"] if answer.status_code == 200 else body["error"]["message"]


@pytest.mark.timeout(600)
async def test_no_process_ends_and_every_request_is_answered_while_the_store_lies(tmp_path: Path) -> None:
    tiny = str(tiny_checkpoint(tmp_path / "tiny"))
    args = f"--dtype float32 --kv-cache-bytes {16 << 20}"
    with EmbeddedServer.start(tmp_path / "redis") as server:
        async with lying_store(str(server.socket_path), 1) as lying:
            config = StackConfig(
                target_model=tiny,
                draft_model=tiny,
                target_args=args,
                draft_args=args,
                metadata_url=lying.url,
                run_dir=tmp_path / "run",
            )
            async with Stack(config) as stack, httpx.AsyncClient(timeout=_ANSWER_S) as http:
                processes = {name: psutil.Process(one.pid) for name, one in stack.processes.items()}
                async with asyncio.timeout(_ANSWER_S):
                    while (plain := [await ask(http, stack, number) for number in (0, 1)])[0][0] != 200:  # noqa: ASYNC110
                        await asyncio.sleep(0.5)
                lying.share = 0.1
                found: Counter[tuple[int, str]] = Counter()
                end_s = asyncio.get_running_loop().time() + _LIE_S
                number = 0
                while asyncio.get_running_loop().time() < end_s:
                    number += 8
                    found.update(await asyncio.gather(*(ask(http, stack, number + one) for one in range(8))))
                    await asyncio.sleep(0.2)
                lying.share = 0.0
                assert lying.num_lies
                assert {text for status, text in found if status == 200} <= {plain[0][1]}
                assert not [each for each in found if each[0] == 500]
                # Where a lie was that keys are required, they stay so.
                async with asyncio.timeout(_ANSWER_S):
                    while (last := await ask(http, stack, 0)) != plain[0] and last[0] != 401:  # noqa: ASYNC110
                        await asyncio.sleep(0.5)
                for name, process in processes.items():
                    assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE, name
                    assert stack.processes[name].pid == process.pid, name
            logs = {path.name: path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*.log")}
    traces = {name: log[log.index("Traceback") :][:3000] for name, log in logs.items() if "Traceback" in log}
    assert not traces, "\n".join(traces.values())
