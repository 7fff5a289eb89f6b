"""python -m tests.soak healthy"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import httpx
from outrider_controller.cli.control import list_workers
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.output import json_file_option, note, write_json
from outrider_controller.cli.stack import Stack
from outrider_controller.cli.stack_config import StackConfig
from outrider_controller.cli.stack_options import run_async
from outrider_controller.control.rows import worker_rows
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from benchmarks.support.asking import max_tokens_option
from tests.e2e.test_dashboards import ask, prometheus
from tests.soak.kill_pairs import Load

_FIRST_PAINT_MS = 1000
# Between two looks at the alerts, and between two loads of the console.
_LOOK_S, _LOAD_S = 5.0, 60.0
# The console's columns by the names of `outrider get workers -o json`.
_COLUMNS = {"id": "id", "role": "role", "status": "status", "model": "model", "address": "address"}
# These change while one looks: equal in one of several looks.
_COLUMNS |= {"running": "running", "waiting": "waiting", "free blocks": "free_blocks"}
_LOOKS = 40
_TABLE = """
const texts = (line) => [...line.children].map((cell) => cell.textContent);
const [head, ...lines] = [...document.querySelectorAll('#workers tr')].map(texts);
return lines.map((line) => Object.fromEntries(line.map((text, at) => [head[at], text])));
"""
_PAINT = "return performance.getEntriesByType('paint').find((one) => one.name === 'first-contentful-paint')?.startTime"


@dataclass(frozen=True, slots=True)
class Opened:
    """The console, opened once."""

    first_paint_ms: float
    errors: int
    """Of the browser's console."""
    looks: int
    """Until its table was that of the command."""
    equal: bool

    @property
    def holds(self) -> bool:
        return self.equal and not self.errors and self.first_paint_ms <= _FIRST_PAINT_MS


@click.command("healthy")
@click.option("--minutes", type=click.FloatRange(0.5), default=10.0, show_default=True)
@click.option("--streams", type=click.IntRange(1), default=8, show_default=True)
@max_tokens_option(64)
@json_file_option
def healthy(minutes: float, streams: int, max_tokens: int, json_file: Path | None) -> int:
    """Under healthy load: does any alert fire, and does the console show what the commands say?

    A real Prometheus with the chart's rules, and the console in a headless Chromium once a minute: first paint within
    a second, no error in its console, the workers' table equal to `outrider get workers`.
    """
    for command in ("prometheus", "chromium", "chromedriver"):
        if shutil.which(command) is None:
            raise CommandError(f"needs {command} (Debian: prometheus, chromium, chromium-driver)")
    return run_async(_healthy(minutes, streams, max_tokens, json_file))


async def _healthy(minutes: float, streams: int, max_tokens: int, json_file: Path | None) -> int:
    alerts: Counter[str] = Counter()
    opened: list[Opened] = []
    with tempfile.TemporaryDirectory(prefix="healthy-") as scratch:
        async with (
            Stack(StackConfig(), note) as stack,
            prometheus(Path(scratch), stack.scrape_file) as url,
            httpx.AsyncClient(base_url=url, timeout=30.0) as client,
        ):
            load = Load(stack.gateway_grpc, stack.config.model, max_tokens)
            async with load.running(streams):
                end_s, next_load_s = time.monotonic() + minutes * 60, time.monotonic() + 10
                while time.monotonic() < end_s:
                    await asyncio.sleep(_LOOK_S)
                    for one in await ask(client, "ALERTS"):
                        alerts[f"{one['metric']['alertname']} {one['metric']['alertstate']}"] += 1
                    if time.monotonic() >= next_load_s:
                        next_load_s += _LOAD_S
                        opened.append(await _open(stack, Path(scratch) / f"browser-{len(opened)}"))
                        note(f"{opened[-1]}; {len(load.ended)} requests; alerts: {dict(alerts) or 'none'}")
            up = await ask(client, "up")
    failed = sum(1 for one in load.ended if one.error)
    firing = sorted(name for name in alerts if name.endswith("firing"))
    paints = sorted(one.first_paint_ms for one in opened)
    note(f"{minutes:g} minutes, {streams} streams: {len(load.ended)} requests, {failed} failed")
    note(f"alerts that fired: {firing or 'none'}")
    note(f"pending at some time: {sorted(set(alerts) - set(firing)) or 'none'}; {len(up)} processes scraped")
    note(f"console opened {len(opened)} times: first paint {paints[0]:.0f} to {paints[-1]:.0f} ms")
    note(f"{sum(one.errors for one in opened)} errors; equal to the command in {sum(one.equal for one in opened)}")
    figures = {"alerts": alerts, "requests": len(load.ended), "failed": failed, "console": [asdict(o) for o in opened]}
    write_json(json_file, "healthy", figures)
    return 0 if not firing and not failed and opened and all(one.holds for one in opened) else 1


async def _open(stack: Stack, profile: Path) -> Opened:
    with _browser(profile) as driver:
        await asyncio.to_thread(driver.get, f"http://{stack.ops['control']}/console")
        looks, equal = 0, False
        while not equal and looks < _LOOKS:
            await asyncio.sleep(0.25)
            looks += 1
            shown = await asyncio.to_thread(driver.execute_script, _TABLE)
            rows = worker_rows((await list_workers(stack.control)).workers)
            equal = bool(rows) and _of_table(shown) == [
                {name: str(row[name]) for name in _COLUMNS.values()} for row in rows
            ]
        paint_ms = await asyncio.to_thread(driver.execute_script, _PAINT)
        errors = [line for line in driver.get_log("browser") if line["level"] == "SEVERE"]
        for line in errors:
            note(str(line))
        return Opened(float(paint_ms), len(errors), looks, equal)


def _of_table(shown: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{name: line.get(heading, "") for heading, name in _COLUMNS.items()} for line in shown]


@contextmanager
def _browser(profile: Path) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in ("headless", "no-sandbox", "disable-gpu", f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(str(shutil.which("chromedriver")), env={**os.environ}))
    try:
        yield driver
    finally:
        driver.quit()
