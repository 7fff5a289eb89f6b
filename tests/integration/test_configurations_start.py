"""What --check-config accepts starts, and what it refuses does not."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from outrider.gateway.config import parse_arguments as parse_gateway
from outrider.gateway.server import running as running_gateway
from outrider_controller.config import ControllerConfig, on_node
from outrider_controller.config import parse_arguments as parse_controller
from outrider_controller.control.config import parse_arguments as parse_control
from outrider_controller.control.server import control_process
from outrider_controller.router.config import parse_arguments as parse_router
from outrider_controller.router.process import router_process

Start = Callable[[Any], AbstractAsyncContextManager[Any]]
ROLES: dict[str, tuple[Callable[[Sequence[str]], Any], Start]] = {
    "outrider_controller.router": (parse_router, router_process),
    "outrider_controller.control": (parse_control, control_process),
    "outrider.gateway": (parse_gateway, running_gateway),
}

# Nobody listens there: a process starts without its metadata store.
AWAY = ("--metadata", "redis://127.0.0.1:1")
SOCKET = ("--metadata", "unix:///nonexistent/redis.sock")
# SALT and MODEL stand for files of the test's own.
WIDE = ("--listen", "0.0.0.0:0", "--insecure", "--cache-salt-key-file", "SALT")
WIDE_CONTROL = ("--listen", "0.0.0.0:0", "--insecure")
PUBLIC = ("--listen-http", "127.0.0.1:0", "--listen-grpc", "0.0.0.0:0", "--insecure", "--drain-delay", "0")
WORKER = ("--model", "MODEL", "--listen", "0.0.0.0:0", "--insecure")
CLUSTER = ("--ray-address", "127.0.0.1:1", "--cache-salt-key-file", "SALT")

QUICK: list[tuple[str, tuple[str, ...], str]] = [
    ("outrider_controller.router", AWAY, ""),
    ("outrider_controller.router", (*AWAY, *WIDE, "--advertise", "auto"), ""),
    ("outrider_controller.router", (*SOCKET, *WIDE, "--advertise", "auto"), "advertise: auto finds no address"),
    ("outrider_controller.router", (*SOCKET, "--advertise", "auto"), ""),
    ("outrider_controller.control", AWAY, ""),
    ("outrider_controller.control", (*AWAY, *WIDE_CONTROL, "--advertise", "auto"), ""),
    ("outrider_controller.control", (*SOCKET, *WIDE_CONTROL, "--advertise", "auto"), "advertise: auto finds no"),
    ("outrider.gateway", (*AWAY, *PUBLIC, "--advertise", "auto"), ""),
    ("outrider.gateway", (*SOCKET, *PUBLIC, "--advertise", "auto"), "advertise: auto finds no address"),
]
SLOW: list[tuple[str, tuple[str, ...], str]] = [
    *QUICK,
    ("outrider_controller", AWAY, ""),
    ("outrider_controller", (*AWAY, "--router-listen", "0.0.0.0:0"), "router.advertise: needed where"),
    ("outrider_controller", (*AWAY, *CLUSTER), "ray_address: routers and control plane listen at their nodes'"),
    ("outrider.target", (*AWAY, *WORKER, "--advertise", "auto"), ""),
    ("outrider.target", (*SOCKET, *WORKER, "--advertise", "auto"), "advertise: auto finds no address"),
    ("outrider.draft", (*AWAY, *WORKER, "--advertise", "auto"), ""),
    ("outrider.draft", (*SOCKET, *WORKER, "--advertise", "auto"), "advertise: auto finds no address"),
]
# Each process says so in a line of its own, once it serves.
_SERVES = (b" listens on ", b" serves ", b"router at ", b"serving gRPC on ")


@pytest.fixture
def salt(tmp_path: Path) -> str:
    (tmp_path / "salt").write_text("k" * 40)
    return str(tmp_path / "salt")


def checked(
    parse: Callable[[Sequence[str]], Any], arguments: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> tuple[bool, str]:
    """Whether --check-config accepts them, and what it says."""
    with pytest.raises(SystemExit) as ended:
        parse([*arguments, "--check-config"])
    said = capsys.readouterr()
    return ended.value.code == 0, said.out + said.err


@pytest.mark.parametrize(("role", "words", "refusal"), QUICK)
async def test_what_a_check_accepts_starts_and_serves(
    role: str, words: tuple[str, ...], refusal: str, salt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parse, start = ROLES[role]
    arguments = [salt if word == "SALT" else word for word in words]
    accepted, said = checked(parse, arguments, capsys)
    assert (accepted, refusal in said) == (not refusal, True), said
    if accepted:
        async with asyncio.timeout(60), start(parse(arguments)):
            pass


@pytest.mark.parametrize("more", [(), ("--insecure",)])
async def test_what_a_check_accepts_of_a_ray_cluster_is_possible_on_its_nodes(
    more: tuple[str, ...], salt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--ray-address", "10.0.0.7:6379", *AWAY, "--cache-salt-key-file", salt, *more]
    accepted, said = checked(parse_controller, arguments, capsys)
    assert accepted == bool(more), said
    if accepted:
        config: ControllerConfig = parse_controller(arguments)
        actors: list[Any] = [*config.controls(), *config.routers()]
        for actor in actors:
            on_node(actor, "10.0.0.8")


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_each_process_starts_on_what_its_check_accepts_and_on_nothing_else(tiny: Path, salt: str) -> None:
    for role, words, refusal in SLOW:
        files = {"SALT": salt, "MODEL": str(tiny)}
        command = [sys.executable, "-m", role, *(files.get(word, word) for word in words)]
        check = await asyncio.create_subprocess_exec(*command, "--check-config", stdout=DEVNULL, stderr=PIPE)
        _, said = await check.communicate()
        assert (check.returncode, refusal.encode() in said) == (2 if refusal else 0, True), (command, said)
        async with AsyncExitStack() as stack:
            process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=PIPE, env=os.environ)
            stack.push_async_callback(_end, process)
            async with asyncio.timeout(90):
                assert (await _serves(process), bool(refusal)) in ((True, False), (False, True)), command


async def _serves(process: Process) -> bool:
    assert process.stderr is not None
    async for line in process.stderr:
        # A log line, and not a refusal.
        if line.startswith(b"{") and any(words in line for words in _SERVES):
            return True
    return False


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
    await process.communicate()
