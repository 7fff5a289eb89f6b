"""Every command that README.md and docs/ show runs as it is typed, in the page's order, from a fresh directory."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from outrider.user_cache import cache_directory

from tests.documented import PAGES, ROOT, Command, commands
from tests.ports import free_port

COMMANDS = [command for page in PAGES for command in commands(page)]
_QUICK = [command for command in COMMANDS if command.quick]
_SLOW = [command for command in COMMANDS if not command.quick and not command.reason]
_GOES_ON = re.compile(r"outrider (up|target|draft|gateway|controller)\b|outrider events -w")
_UP_S, _COMMAND_S = 900.0, 900.0


class Shell:
    """A fresh directory with what a reader has there: the clone, prompts, and one stack at a time."""

    def __init__(self, where: Path) -> None:
        self.where = where / "clone"
        self.where.mkdir()
        for entry in [*ROOT.iterdir()]:
            if entry.name not in (".git", "build"):
                (self.where / entry.name).symlink_to(entry)
        prompts = ["Why is the sky blue?", "one two three one two three", *(f"Name {n} rivers." for n in range(62))]
        for name in ("prompts", "all", "others"):
            lines = [json.dumps({"id": str(n), "category": "all", "prompt": text}) for n, text in enumerate(prompts)]
            (self.where / f"{name}.jsonl").write_text("\n".join(lines[:4] if name == "prompts" else lines) + "\n")
        cache = where / "cache"
        cache.mkdir()
        # What took a download, a compiler or a measurement is here; contexts and runs are this directory's own.
        # Links to what is executed or trusted are refused.
        for name, here in {"models": False, "converted": False, "native": True, "digests": True, "ways": True}.items():
            kept = cache_directory() / name
            if kept.is_dir():
                shutil.copytree(kept, cache / name) if here else (cache / name).symlink_to(kept)
        home = where / "home"
        (home / "prod/operator").mkdir(parents=True)
        for name in ("token", "key", "operator/ca.crt", "operator/tls.crt", "operator/tls.key"):
            (home / "prod" / name).write_text("what an operator was given\n")
        ports = [free_port() for _ in range(3)]
        self._http = f"127.0.0.1:{ports[0]}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")},
            "HOME": str(home),
            "OUTRIDER_CACHE": str(cache),
            "OUTRIDER_STATE": str(where / "state"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            # Another stack may have the usual ones.
            **{f"OUTRIDER_UP_{n}_PORT": str(port) for n, port in zip(("HTTP", "GRPC", "CONTROL"), ports, strict=True)},
        }
        self._running: list[subprocess.Popen[bytes]] = []
        self._up = False
        self._request = ""

    def run(self, command: Command) -> None:
        if command.text.startswith("outrider up"):
            self.close()
        elif not self._up and (command.asks_a_stack or _GOES_ON.match(command.text)):
            self._begin(replace(command, text="outrider up"))
        if _GOES_ON.match(command.text):
            self._begin(command)
            return
        text = command.text.replace("127.0.0.1:8000", self._http)
        argv = ["bash", "-c", self._filled_in(text)]
        if command.kind == "python":
            argv = [sys.executable, "-c", text]
        ended = subprocess.run(
            argv, cwd=self.where, env=self.environment, capture_output=True, text=True, timeout=_COMMAND_S
        )
        said = f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
        assert ended.returncode == 0, f"{command.page}:{command.line}: {command.text}\n{said}"
        assert not re.search(r'^\{"error"', ended.stdout), f"{command.page}:{command.line}: {said}"

    def _begin(self, command: Command) -> None:
        """What runs until Ctrl-C; a stack until it answers, anything else for three seconds."""
        log = self.where.parent / f"{len(self._running)}.log"
        with log.open("wb") as out:
            begun = subprocess.Popen(
                ["bash", "-c", f"exec {command.text}"],
                cwd=self.where,
                env=self.environment,
                stdout=out,
                stderr=out,
            )
        self._running.append(begun)
        is_stack = command.text.startswith("outrider up")
        deadline_s = time.monotonic() + (_UP_S if is_stack else 3.0)
        while time.monotonic() < deadline_s and not (is_stack and b"Ctrl-C stops" in log.read_bytes()):
            assert begun.poll() is None, f"{command.page}:{command.line}: {command.text}\n{log.read_text()[-2000:]}"
            time.sleep(0.2)
        self._up |= is_stack
        assert not is_stack or b"Ctrl-C stops" in log.read_bytes(), log.read_text()[-2000:]
        if is_stack:
            # Before the page makes a key, which every request then needs.
            self._request = str(json.loads(self._asked("outrider generate -o json --max-tokens 8 hello"))["id"])

    def _filled_in(self, text: str) -> str:
        """What a reader puts in the place of words in capitals."""
        found = {"WORKER": r"\bWORKER\b", "ID": r"\bworker ID\b", "REQUEST": r"\bREQUEST\b"}
        for name, pattern in found.items():
            if re.search(pattern, text.partition("#")[0]):
                text = re.sub(pattern, lambda m, name=name: m[0].replace(name, self._value(name)), text)
        return text

    def _value(self, name: str) -> str:
        if name == "REQUEST":
            return self._request
        workers = json.loads(self._asked("outrider get workers -o json"))["workers"]
        return next(str(each["id"]) for each in workers if each["role"] == "target")

    def _asked(self, text: str) -> str:
        return subprocess.run(
            ["bash", "-c", text], cwd=self.where, env=self.environment, capture_output=True, text=True, check=True
        ).stdout

    def close(self) -> None:
        """Ctrl-C, the last first."""
        for begun in reversed(self._running):
            if begun.poll() is None:
                begun.send_signal(signal.SIGINT)
                begun.wait(60)
        self._running.clear()
        self._up = False


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    try:
        yield shell
    finally:
        shell.close()


def _pages(chosen: list[Command]) -> list[list[Command]]:
    return [list(group) for _, group in itertools.groupby(chosen, key=lambda command: command.page)]


def _id(chosen: list[Command]) -> str:
    return chosen[0].page


def test_each_command_runs_or_says_why_not() -> None:
    marked = [command for command in COMMANDS if command.reason]
    assert len(COMMANDS) == len(_QUICK) + len(_SLOW) + len(marked) and min(map(len, (_QUICK, _SLOW))) > 5
    text = "".join(page.read_text() for page in PAGES)
    assert text.count("<!-- not run by tests") == len(re.findall(r"<!-- not run by tests[^\n]+-->\n *```sh\n", text))


@pytest.mark.parametrize("chosen", _pages(_QUICK), ids=_id)
def test_what_takes_seconds_runs_as_typed(chosen: list[Command], shell: Shell) -> None:
    for command in chosen:
        shell.run(command)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("chosen", _pages(_SLOW), ids=_id)
def test_commands_run_as_typed_one_after_another(chosen: list[Command], shell: Shell) -> None:
    tenants = re.search(r"^```yaml\n(tenants:\n.*?)^```", (ROOT / "docs/operations.md").read_text(), re.DOTALL | re.M)
    assert tenants is not None
    (shell.where / "tenants.yaml").write_text(tenants[1])
    for command in chosen:
        shell.run(command)
    assert shutil.which("outrider", path=shell.environment["PATH"])
