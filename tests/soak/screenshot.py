"""python -m tests.soak screenshot"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import click
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.output import note
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig
from outrider_controller.cli.up.stack_options import run_async

from tests.soak.console_page import browser, needs
from tests.soak.kill_pairs import Load

PICTURE = Path(__file__).parents[2] / "docs/console.png"
_STREAMS, _MAX_TOKENS, _WIDTH = 3, 400, 1200
_WITHIN_S = 100.0
# One that goes on for a while.
_CLICK = """
const young = [...document.querySelectorAll('#sequences tbody tr')].filter((line) => {
  const tokens = Number(line.children[4].textContent);
  return tokens > 40 && tokens < 300;
});
young[Math.floor(Math.random() * young.length)]?.querySelector('button').click();
"""
# Under way, with all three kinds of tokens among its last rounds.
_READY = """
const rate = Number(document.getElementById('summary').textContent.match(/(\\d+) tokens\\/s/)?.[1]);
const last = [...document.querySelectorAll('.round')].slice(-10);
const many = (kind) => last.flatMap((line) => [...line.querySelectorAll(`.token.${kind}`)]).length;
return rate > 0 && document.getElementById('trace').textContent.startsWith('Running')
  && many('accepted') > 6 && many('own') > 6 && many('rejected') > 2;
"""
_HEIGHT = "return document.documentElement.scrollHeight"


@click.command("screenshot")
@click.option("--to", type=click.Path(dir_okay=False, writable=True, path_type=Path), default=PICTURE)
def screenshot(to: Path) -> int:
    """Take the manual's picture of the console: a stack under load, and one of its requests under way."""
    needs("chromium", "chromedriver")
    return run_async(_screenshot(to))


async def _screenshot(to: Path) -> int:
    config = StackConfig(targets=2, trace_tokens=True)
    with tempfile.TemporaryDirectory(prefix="screenshot-") as profile:
        async with Stack(config, note) as stack:
            load = Load(stack.gateway_grpc, stack.config.model, _MAX_TOKENS)
            with browser(Path(profile), _WIDTH) as driver:
                async with load.running(_STREAMS):
                    await asyncio.to_thread(driver.get, f"http://{stack.ops['control']}/console")
                    await _show_a_telling_request(driver)
                    size = (_WIDTH, int(driver.execute_script(_HEIGHT)))
                    driver.execute_cdp_cmd(
                        "Emulation.setDeviceMetricsOverride",
                        {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False},
                    )
                    to.write_bytes(driver.get_screenshot_as_png())
    note(f"{to}: {size[0]} × {size[1]}")
    return 0


async def _show_a_telling_request(driver: Any) -> None:
    """Clicks on one after another."""
    try:
        async with asyncio.timeout(_WITHIN_S):
            while not await asyncio.to_thread(driver.execute_script, _READY):
                await asyncio.to_thread(driver.execute_script, _CLICK)
                await asyncio.sleep(1.2)
    except TimeoutError:
        raise CommandError(f"no request with drafts was there to be shown within {_WITHIN_S:g} s") from None
