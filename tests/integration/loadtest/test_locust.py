"""Locust, as a process of its own, against a real gateway before a scripted router."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import grpc
import pytest
from outrider.gateway.config import GatewayConfig
from outrider.gateway.server import running
from outrider.rpc.v1 import control_pb2, control_pb2_grpc

from tests.integration.gateway.scripted_router import MODEL, ScriptedRouter, routing, saying

_ROOT = Path(__file__).resolve().parents[3]
_PROFILE = """\
shape: {kind: steady, num_users: 12, seconds: 5}
slo: {e2e_ms: 60000}
tenants:
  - {name: chat, protocol: http, max_tokens: 12}
  - {name: tools, max_tokens: 12, body: {tools: [{type: function, function: {name: f}}], presence_penalty: 0.5}}
  - {name: plain, endpoint: completions, max_tokens: 12}
  - {name: items, endpoint: responses, max_tokens: 12}
  - {name: code, protocol: grpc, max_tokens: 9, wait_s: [0, 0.1]}
"""


@pytest.mark.slow
async def test_users_of_all_apis_are_served_and_reported(tiny: Path, tmp_path: Path) -> None:
    profile = tmp_path / "own.yaml"
    profile.write_text(_PROFILE)
    router = ScriptedRouter(saying(list(range(65, 105)), size=3, pause_s=0.01), max_context_len=4096)
    async with routing(router) as address:
        config = GatewayConfig(listen_grpc="127.0.0.1:0", listen_http="127.0.0.1:0", routers=(address,))
        async with running(config) as gateway:
            where = ["--http", gateway.http_address, "--grpc", gateway.grpc_address, "--model", MODEL]
            command = ["-m", "loadtest", "--profile", str(profile), "--out", str(tmp_path), *where]
            code, output = await _run(command, tmp_path)
    assert code == 0, output
    *rows, total = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert all(row["requests"] > 0 and row["ttft_ms_p50"] > 0 for row in rows)
    assert total["requests"] == sum(row["requests"] for row in rows) <= len(router.requests)
    chat, code = (next(row for row in rows if row["tenant"] == name) for name in ("chat", "code"))
    assert (total["failed"], total["goodput"]) == (0, 1.0)
    # Four deliveries of three tokens, and three of three: everything accepted but the target's own.
    assert chat["tpot_ms_p50"] > 1 and chat["ttft_ms_p50"] > 0 and code["itl_ms_p50"] > 5
    # What the scripted router accepts.
    lengths = {row["tenant"]: row["tokens_per_round"] for row in rows}
    assert lengths == dict.fromkeys(("chat", "tools", "plain", "items", "code"), 3.0)
    html = (tmp_path / "report.html").read_text()
    assert "chat: first token" in html and "code: inter-token" in html
    # Locust's report counts requests, those of the warm-up too; not the samples of their parts.
    counts = _counts(html)
    whole = [count for name, count in counts.items() if ": " not in name and name != "Aggregated"]
    assert counts["Aggregated"] == sum(whole) and counts["code: inter-token"] and counts["chat: first token"]


def _counts(html: str) -> dict[str, int]:
    """By the name of a row, from what Locust's report gives to its own script."""
    start = "window.templateArgs = "
    found, _ = json.JSONDecoder().raw_decode(html[html.index(start) + len(start) :])
    return {row["name"]: row["num_requests"] for row in found["requests_statistics"]}


class _Control(control_pb2_grpc.ControlServiceServicer):
    """Knows of no workers."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def ListWorkers(
        self, request: control_pb2.ListWorkersRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.ListWorkersResponse:
        self.num_asked += 1
        return control_pb2.ListWorkersResponse()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [(), ("--processes", "2")], ids=["one process", "master and workers"])
async def test_a_test_fails_for_requests_cut_off_in_the_warm_up_or_open_at_the_end(
    processes: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text("""\
shape: {kind: steady, num_users: 4, seconds: 4}
warm_up_s: 3.9
faults: {every_s: 1, roles: [draft]}
tenants: [{name: chat}]
""")
    connections = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        if connections > 1:
            await reader.read()
        else:
            await reader.readuntil(b"\r\n\r\n")
        writer.close()

    control, control_server = _Control(), grpc.aio.server()
    control_pb2_grpc.add_ControlServiceServicer_to_server(control, control_server)
    control_port = control_server.add_insecure_port("127.0.0.1:0")
    await control_server.start()
    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        settings = {
            "LOADTEST_PROFILE": str(tmp_path / "own.yaml"),
            "LOADTEST_HTTP": f"127.0.0.1:{server.sockets[0].getsockname()[1]}",
            "LOADTEST_CONTROL": f"127.0.0.1:{control_port}",
            "LOADTEST_JSON": str(tmp_path / "report.json"),
            "LOCUST_STOP_TIMEOUT": "1",
        }
        command = ["-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--only-summary", *processes]
        code, output = await _run(command, tmp_path, settings)
    await control_server.stop(None)
    assert code == 1, output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["errors"] == {
        "broken answer: HTTPConnectionClosed": 1,
        "no end of the answer by the end of the test": 4,
    }, output
    assert report["failures"][0] == "requests failed: 5"
    assert "no draft was killed" in report["failures"]
    # Only one of the processes asks whom to kill, once a second.
    assert 1 <= control.num_asked <= 5
    assert report["client_processes"] == (3 if processes else 1)


async def _run(command: list[str], home: Path, settings: dict[str, str] | None = None) -> tuple[int | None, str]:
    """The exit code and the output of Python with these arguments."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        cwd=_ROOT,
        env={**os.environ, "HOME": str(home), "OUTRIDER_CACHE": str(home / "cache"), **(settings or {})},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = (await process.communicate())[0].decode()
    return process.returncode, output
