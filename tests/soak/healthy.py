"""python -m tests.soak healthy"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import httpx
import yaml
from outrider_controller.cli.output import json_file_option, note, write_json
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig
from outrider_controller.cli.up.stack_options import run_async

from benchmarks.support.asking import max_tokens_option
from tests.e2e.test_alerts import shortened
from tests.e2e.test_dashboards import ask, prometheus
from tests.soak.console_page import Comparison, browser, commands_say, first_paint_ms, needs, tables
from tests.soak.kill_pairs import Load
from tests.unit.deploy.test_monitoring import MONITORING

_FIRST_PAINT_MS = 1000
# Between two looks at the alerts, and between two loads of the console.
_LOOK_S, _LOAD_S = 5.0, 60.0
_LOOKS = 60
_SCRAPED_S = 60.0
_COMPARED = {"workers", "tenants", "sequences"}


@dataclass(frozen=True, slots=True)
class Opened:
    """The console, opened once."""

    first_paint_ms: float
    errors: int
    """Of the browser's console."""
    looks: int
    """Until each of its tables had been what the commands say."""
    unequal: tuple[str, ...]
    """Tables that never were."""

    @property
    def holds(self) -> bool:
        return not self.unequal and not self.errors and self.first_paint_ms <= _FIRST_PAINT_MS


@click.command("healthy")
# Of the shortened rules the slowest looks back a minute, and then waits.
@click.option("--minutes", type=click.FloatRange(2.0), default=10.0, show_default=True)
@click.option("--streams", type=click.IntRange(1), default=8, show_default=True)
@max_tokens_option(64)
@json_file_option
def healthy(minutes: float, streams: int, max_tokens: int, json_file: Path | None) -> int:
    """Under healthy load: does any alert fire, and does the console show what the commands say?

    A real Prometheus with the chart's rules, and with the same in a sixtieth of their times, so that those that wait
    for minutes could fire too. Once a minute the console in a headless Chromium: first paint within a second, no error
    in its console, and workers, tenants and requests as `outrider get workers`, `explain` and `get sequences` have
    them.
    """
    needs("prometheus", "chromium", "chromedriver")
    return run_async(_healthy(minutes, streams, max_tokens, json_file))


def both_lengths(text: str) -> dict[str, Any]:
    """The rules, and the same shortened, with names of their own."""
    short = re.sub(r"\b(outrider:|Outrider(?=[A-Z]))", r"short_\1", shortened(text))
    groups = yaml.safe_load(short)["groups"]
    for group in groups:
        group["name"] = f"short.{group['name']}"
    return {"groups": [*yaml.safe_load(text)["groups"], *groups]}


async def _healthy(minutes: float, streams: int, max_tokens: int, json_file: Path | None) -> int:
    alerts: Counter[str] = Counter()
    opened: list[Opened] = []
    with tempfile.TemporaryDirectory(prefix="healthy-") as scratch:
        rules = Path(scratch) / "rules.yaml"
        rules.write_text(yaml.safe_dump(both_lengths((MONITORING / "rules.yaml").read_text())))
        async with (
            Stack(StackConfig(), note) as stack,
            prometheus(Path(scratch), stack.scrape_file, rules) as url,
            httpx.AsyncClient(base_url=url, timeout=30.0) as client,
        ):
            await _first_scraped(client)
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
                compared = await ask(client, "short_outrider:acceptance:ratio_rate10m offset 1m")
            up = await ask(client, "up")
    failed = sum(1 for one in load.ended if one.error)
    firing = sorted(name for name in alerts if name.endswith("firing"))
    paints = sorted(one.first_paint_ms for one in opened)
    note(f"{minutes:g} minutes, {streams} streams: {len(load.ended)} requests, {failed} failed")
    note(f"alerts that fired: {firing or 'none'}")
    note(f"pending at some time: {sorted(set(alerts) - set(firing)) or 'none'}; {len(up)} processes scraped")
    note(f"console opened {len(opened)} times: first paint {paints[0]:.0f} to {paints[-1]:.0f} ms")
    unequal = Counter(name for one in opened for name in one.unequal)
    note(f"{sum(one.errors for one in opened)} errors; never equal to the commands: {dict(unequal) or 'nothing'}")
    figures = {"alerts": alerts, "requests": len(load.ended), "failed": failed, "console": [asdict(o) for o in opened]}
    write_json(json_file, "healthy", figures)
    holds = all(one.holds for one in opened) and bool(compared)
    return 0 if not firing and not failed and opened and holds else 1


async def _first_scraped(client: httpx.AsyncClient) -> None:
    """Until then every process is missed."""
    async with asyncio.timeout(_SCRAPED_S):
        while not await ask(client, "outrider_build_info") or await ask(client, "ALERTS"):  # noqa: ASYNC110
            await asyncio.sleep(1.0)


async def _open(stack: Stack, profile: Path) -> Opened:
    with browser(profile) as driver:
        await asyncio.to_thread(driver.get, f"http://{stack.ops['control']}/console")
        looks, comparison = 0, Comparison()
        while comparison.equal < _COMPARED and looks < _LOOKS:
            await asyncio.sleep(0.2)
            looks += 1
            # First the commands: what the page shows now was asked for between this answer and those before it.
            said = await commands_say(stack.control)
            comparison.look(await asyncio.to_thread(tables, driver), said)
        paint_ms = await asyncio.to_thread(first_paint_ms, driver)
        errors = [line for line in driver.get_log("browser") if line["level"] == "SEVERE"]
        for line in errors:
            note(str(line))
        return Opened(paint_ms, len(errors), looks, tuple(sorted(_COMPARED - comparison.equal)))
