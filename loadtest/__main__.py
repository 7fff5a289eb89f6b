"""python -m loadtest: runs one profile against the stack on this machine, or against one started for the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import click
from outrider_controller.cli.app import main
from outrider_controller.cli.clusters import contexts
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import note

from loadtest.prompts import read_prompts
from loadtest.settings import PROFILES, Stack, read_profile

_ROOT = Path(__file__).resolve().parents[1]
_STOP_TIMEOUT_S = 60.0


@click.command("loadtest")
@click.option("--profile", default="steady", show_default=True, metavar="NAME|FILE", help="What to do; see --list.")
@click.option("--list", "list_profiles", is_flag=True, help="Name the profiles.")
@click.option("--up", "start", is_flag=True, help="Start a stack with `outrider up`, and stop it at the end.")
@click.option("--context", default="", metavar="NAME", help="Stack to ask, by the name that `outrider up` gave it.")
@click.option("--http", default="", metavar="HOST:PORT", help="Ask this gateway, which may be anywhere.")
@click.option("--grpc", default="", metavar="HOST:PORT", help="The same gateway's gRPC address.")
@click.option("--model", default="", metavar="NAME", help="Model to ask for.")
@click.option("--prompts", default="", metavar="FILE", help="Prompts instead of the profile's: JSON.")
@click.option("--out", default="loadtest-report", show_default=True, metavar="DIR", help="For the two reports.")
def loadtest(
    profile: str,
    list_profiles: bool,
    start: bool,
    context: str,
    http: str,
    grpc: str,
    model: str,
    prompts: str,
    out: str,
) -> int:
    """Put load on a stack, and measure how it performs.

    Prints a table with one line a tenant, and writes it as JSON beside Locust's own report in HTML. Exit code 0 when no
    request failed, goodput reached the profile's least, and workers were killed as it asks; 1 otherwise.
    """
    if list_profiles:
        click.echo("\n".join(sorted(path.stem for path in PROFILES.glob("*.yaml"))))
        return ExitCode.OK
    try:
        stack = read_profile(profile).stack
    except (OSError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="--profile") from None
    try:
        if prompts:
            read_prompts(Path(prompts))
    except OSError as error:
        raise click.BadParameter(str(error), param_hint="--prompts") from None
    with _stack(stack) if start else _found(context) as endpoints:
        given = {name: value for name, value in {"http": http, "grpc": grpc, "model": model}.items() if value}
        return _locust(profile, {**endpoints, **given}, prompts, Path(out))


@contextmanager
def _found(context: str) -> Iterator[Mapping[str, str]]:
    chosen = contexts.choose(context, contexts.running())
    yield chosen.endpoints if chosen else {}


@contextmanager
def _stack(stack: Stack) -> Iterator[Mapping[str, str]]:
    """Starts a stack for the block. Raises CommandError when it does not start; the reason is on stderr."""
    wanted = {"OUTRIDER_UP_TARGETS": str(stack.targets), "OUTRIDER_UP_DRAFTS": str(stack.drafts)}
    free = [word for port in ("http", "grpc", "control") for word in (f"--{port}-port", "0")]
    name = f"loadtest-{os.getpid()}"
    command = [sys.executable, "-m", "outrider_controller.cli", "up", "-o", "json", "--context", name, *free]
    with tempfile.TemporaryDirectory(prefix="outrider-loadtest-") as state:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**wanted, **os.environ, "OUTRIDER_STATE": state}
        )
        try:
            yield _endpoints(process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(_STOP_TIMEOUT_S)


def _endpoints(process: subprocess.Popen[str]) -> Mapping[str, str]:
    """Reads the object that `outrider up` prints when everything is ready."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line == "}\n":
            endpoints: dict[str, str] = json.loads(text)
            return endpoints
    raise CommandError("the stack did not start")


def _locust(profile: str, endpoints: Mapping[str, str], prompts: str, out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    settings = {
        f"LOADTEST_{name.upper()}": endpoints[name]
        for name in ("http", "grpc", "model", "control")
        if name in endpoints
    }
    settings |= {"LOADTEST_PROFILE": profile, "LOADTEST_JSON": str((out / "report.json").resolve())}
    settings |= {"LOADTEST_PROMPTS": str(Path(prompts).resolve())} if prompts else {}
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--only-summary"]
    command += ["--html", str((out / "report.html").resolve()), "--loglevel", "WARNING"]
    if profile.endswith((".yaml", ".yml")):
        settings["LOADTEST_PROFILE"] = str(Path(profile).resolve())
    code = subprocess.run(command, cwd=_ROOT, env={**os.environ, **settings}).returncode
    note(f"reports in {out}")
    return code


if __name__ == "__main__":
    main(command=loadtest, name="python -m loadtest")
