"""Each extra, installed from the wheel into an environment of its own, is complete: what it is for starts."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.target.grammars.tokenizer import read_tokenizer

from tests.integration.gateway.scripted_router import MODEL, ScriptedRouter, routing, saying
from tests.redis_server import EmbeddedServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
# As in the README: which torch is the user's choice, made before. A plain one brings CUDA.
TORCH = os.environ.get("TORCH", "torch==2.13.0")
START_S = 120


@pytest.fixture
def quick_clients() -> None:
    """pip asks the internet."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    # What builds it is in this environment.
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(directory), str(ROOT)], check=True, timeout=300)
    (built,) = directory.glob("outrider-*.whl")
    return built


@pytest.fixture
def environment(request: pytest.FixtureRequest, wheel: Path) -> Iterator[Path]:
    """A directory in which python has the extra that is the parameter, and nothing else of ours. All may read it."""
    extra, torch = request.param
    directory = Path(tempfile.mkdtemp(dir="/tmp", prefix="environment-"))
    directory.chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True, timeout=120)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    package = f"outrider[{extra}]" if extra else "outrider"
    for wanted in [*([TORCH] if torch else []), f"{package} @ {wheel.as_uri()}"]:
        subprocess.run([*pip, wanted], check=True, timeout=800)
    yield directory
    # Some gigabyte each.
    shutil.rmtree(directory)


def extra(name: str, *, torch: bool = False) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("environment", [(name, torch)], ids=[name or "none"], indirect=True)


def has(environment: Path, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([str(environment / "bin" / "python"), "-I", "-c", code], timeout=60).returncode == 0


def _others_may_run(program: Path) -> bool:
    return all(one.stat().st_mode & 0o001 for one in (program, *program.parents))


@asynccontextmanager
async def started(environment: Path, *arguments: str, as_nobody: bool = False) -> AsyncIterator[Process]:
    """A program of that environment, started elsewhere than in the sources. It must end well.

    as_nobody: without a home; where the tests run as root, and others may run their python, as a user who may write
    nowhere.
    """
    python = str(environment / "bin" / "python")
    user: dict[str, Any] = {"user": "nobody", "group": "nogroup", "extra_groups": ()}
    who = user if as_nobody and os.geteuid() == 0 and _others_may_run(Path(sys.executable).resolve()) else {}
    variables = {"PATH": ""} if as_nobody else {"HOME": str(environment), "PATH": ""}
    process = await asyncio.create_subprocess_exec(
        python, "-I", "-m", *arguments, stderr=PIPE, cwd=environment, env=variables, **who
    )
    try:
        yield process
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def said(process: Process, pattern: str) -> str:
    """The first group of the first line that matches."""
    assert process.stderr is not None
    seen = ""
    async with asyncio.timeout(START_S):
        while line := (await process.stderr.readline()).decode():
            seen += line
            if found := re.search(pattern, line):
                return found[1]
    raise AssertionError(f"ended without saying {pattern}:\n{seen}")


@extra("engine", torch=True)
@pytest.mark.parametrize("worker", ["target", "draft"])
async def test_engine_runs_workers(environment: Path, tiny: Path, worker: str) -> None:
    async with started(environment, f"outrider.{worker}", "--model", str(tiny), "--listen", "127.0.0.1:0") as process:
        assert await said(process, r"serves .* at (127\.0\.0\.1:\d+)")


@extra("engine,quantization", torch=True)
async def test_quantization_runs_a_target_in_int8(environment: Path, tiny: Path) -> None:
    flags = ("--model", str(tiny), "--listen", "127.0.0.1:0", "--quantization", "int8")
    async with started(environment, "outrider.target", *flags) as process:
        assert await said(process, r"serves .* at (127\.0\.0\.1:\d+)")


@extra("gateway")
async def test_gateway_answers_over_http(environment: Path, tiny: Path) -> None:
    tokenizer = ModelTokenizer.parse(read_tokenizer(tiny))
    router = ScriptedRouter(saying([*tokenizer.encode("It is installed."), 2]))
    listens = ("--listen-grpc", "127.0.0.1:0", "--listen-http", "127.0.0.1:0", "--log-format", "human")
    async with routing(router) as address:
        flags = (*listens, "--router", address)
        assert not has(environment, "torch") and not has(environment, "transformers")
        async with started(environment, "outrider.gateway", *flags, as_nobody=True) as process:
            http = await said(process, r"HTTP on (127\.0\.0\.1:\d+)")
            async with openai.AsyncOpenAI(base_url=f"http://{http}/v1", api_key="none", max_retries=20) as client:
                answer = await client.completions.create(model=MODEL, prompt="Is it?", max_tokens=100)
                assert answer.choices[0].text == "It is installed."


@extra("")
@pytest.mark.parametrize("role", ["router", "control"])
async def test_the_bare_package_runs_routers_and_control_plane(environment: Path, tmp_path: Path, role: str) -> None:
    assert not any(has(environment, package) for package in ("torch", "ray", "transformers"))
    with EmbeddedServer.start(tmp_path / "redis") as redis:
        flags = ("--metadata", redis.url, "--ops-listen", "127.0.0.1:0")
        async with started(environment, f"outrider_controller.{role}", *flags, as_nobody=True) as process:
            assert await said(process, r"listens on (127\.0\.0\.1:\d+)")


@extra("controller")
async def test_controller_runs_routers(environment: Path, tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path / "redis") as redis:
        async with started(environment, "outrider_controller", "--metadata", redis.url) as process:
            assert await said(process, r"router at (127\.0\.0\.1:\d+)")


@extra("controller")
def test_controller_runs_the_command_line(environment: Path) -> None:
    command = [str(environment / "bin" / "outrider"), "get", "workers", "--control", "127.0.0.1:1"]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=environment)
    assert asked.returncode == 5 and "nobody answers" in asked.stderr


@extra("embedded")
def test_embedded_runs_a_server(environment: Path) -> None:
    code = "import subprocess, time; from pathlib import Path\n"
    code += "from outrider.metadata.connection.embedded import ServerCommand\n"
    code += "command = ServerCommand.prepare(Path('redis')); server = subprocess.Popen(command.argv, stdout=2)\n"
    code += "while server.poll() is None and not command.answers(): time.sleep(0.01)\n"
    code += "print('answers' if command.answers() else 'ended'); server.terminate(); server.wait()"
    ran = [str(environment / "bin" / "python"), "-I", "-c", code]
    done = subprocess.run(ran, stdout=subprocess.PIPE, text=True, timeout=60, cwd=environment, env={"PATH": ""})
    assert (done.returncode, done.stdout) == (0, "answers\n")


@extra("otel")
def test_otel_exports_spans(environment: Path) -> None:
    code = "from outrider.telemetry.tracing import open_tracing; print(type(open_tracing('test')).__name__)"
    ran = [str(environment / "bin" / "python"), "-I", "-c", code]
    variables = {"PATH": "", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    done = subprocess.run(ran, stdout=subprocess.PIPE, text=True, timeout=60, cwd=environment, env=variables)
    assert (done.returncode, done.stdout) == (0, "Tracing\n")
