"""Locust, as a process of its own, against a real gateway before a scripted router."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from outrider.gateway.config import GatewayConfig
from outrider.gateway.server import running

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
  - {name: engine, protocol: vllm, max_tokens: 12}
"""


@pytest.mark.slow
async def test_users_of_all_apis_are_served_and_reported(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("smg_grpc_proto")
    profile = tmp_path / "own.yaml"
    profile.write_text(_PROFILE)
    router = ScriptedRouter(saying(list(range(65, 105)), size=3, pause_s=0.01), max_context_len=4096)
    async with routing(router) as address:
        config = GatewayConfig(
            listen_grpc="127.0.0.1:0", listen_http="127.0.0.1:0", routers=(address,), vllm_engine_model=MODEL
        )
        async with running(config) as gateway:
            where = ["--http", gateway.http_address, "--grpc", gateway.grpc_address, "--model", MODEL]
            command = ["-m", "loadtest", "--profile", str(profile), "--out", str(tmp_path), *where]
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                cwd=_ROOT,
                env={**os.environ, "HOME": str(tmp_path), "OUTRIDER_CACHE": str(tmp_path / "cache")},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    *rows, total = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert all(row["requests"] > 0 and row["ttft_ms_p50"] > 0 for row in rows)
    assert total["requests"] == sum(row["requests"] for row in rows) <= len(router.requests)
    chat, code = (next(row for row in rows if row["tenant"] == name) for name in ("chat", "code"))
    assert (total["failed"], total["goodput"]) == (0, 1.0)
    # Four deliveries of three tokens, and three of three: everything accepted but the target's own.
    assert chat["tpot_ms_p50"] > 1 and chat["ttft_ms_p50"] > 0 and code["itl_ms_p50"] > 5
    html = (tmp_path / "report.html").read_text()
    assert "chat: first token" in html and "code: inter-token" in html
