"""The console in a headless Chromium, and whether what it shows is what the commands say."""

from __future__ import annotations

import os
import re
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from outrider.rpc.v1 import control_pb2 as control
from outrider_controller.cli.change.speculation import decision_row
from outrider_controller.cli.clusters.control import Control, call_control
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.show.sequences import sequence_row
from outrider_controller.control.api.rows import worker_rows
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

Row: TypeAlias = dict[str, Any]
Tables: TypeAlias = dict[str, list[Row]]

# The page has what it last asked for, which is a second, and a browser's leisure, ago.
_NUM_SNAPSHOTS = 12
# Of the page's two decimals.
_ROUNDED = 0.0051
# Its columns by the names of `outrider get workers`, `outrider get sequences` and `outrider explain` with -o json.
_WORKERS = {"id": "id", "role": "role", "status": "status", "model": "model", "address": "address"}
_WORKERS |= {"running": "running", "waiting": "waiting", "free blocks": "free_blocks"}
_SEQUENCES = {"request": "id", "tenant": "tenant", "target": "target", "draft": "draft"}
_WHY = re.compile(r"(\w+): ([\d.]+) × plain \(([\d.]+) to ([\d.]+)\)")
_TABLES = """
const texts = (line) => [...line.children].map((cell) => cell.textContent);
const rows = (name) => {
  const [head, ...lines] = [...document.querySelectorAll(`#${name} tr`)].map(texts);
  return lines.map((line) => Object.fromEntries(line.map((text, at) => [head[at], text])));
};
return Object.fromEntries(["tenants", "workers", "sequences"].map((name) => [name, rows(name)]));
"""
_PAINT = "return performance.getEntriesByType('paint').find((one) => one.name === 'first-contentful-paint')?.startTime"


def needs(*commands: str) -> None:
    """Raises CommandError."""
    for command in commands:
        if shutil.which(command) is None:
            raise CommandError(f"needs {command} (Debian: prometheus, chromium, chromium-driver)")


@contextmanager
def browser(profile: Path, width: int = 1200, height: int = 900) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in ("headless", "no-sandbox", "disable-gpu", "hide-scrollbars", f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.add_argument(f"--window-size={width},{height}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(str(shutil.which("chromedriver")), env={**os.environ}))
    try:
        yield driver
    finally:
        driver.quit()


def tables(driver: Any) -> Tables:
    """What the page shows now."""
    shown: Tables = driver.execute_script(_TABLES)
    return shown


def first_paint_ms(driver: Any) -> float:
    return float(driver.execute_script(_PAINT))


async def commands_say(address: str) -> Tables:
    """The rows of `outrider get workers`, `get sequences` and `explain TENANT`, each with -o json."""

    async def read(stub: Control) -> Tables:
        workers = await stub.ListWorkers(control.ListWorkersRequest())
        sequences = await stub.ListSequences(control.ListSequencesRequest(limit=100))
        active = await stub.ListActivities(control.ListActivitiesRequest())
        rows = []
        for name in (one.tenant for one in active.activities if one.tenant):
            explained = await stub.Explain(control.ExplainRequest(tenant=name))
            rows += [{"tenant": name} | decision_row(decision) for decision in explained.decisions] or [
                {"tenant": name}
            ]
        listed = [sequence_row(one) for one in sequences.sequences]
        return {"workers": worker_rows(workers.workers), "sequences": listed, "tenants": rows}

    return await call_control(address, read)


@dataclass(slots=True)
class Comparison:
    """Which of the page's tables have been equal to what the commands say, in one look or another.

    All of it moves under load: identities and words have to be those of one answer of the commands, and numbers that
    change from token to token between the least and the most of the last answers.
    """

    _said: deque[Tables] = field(default_factory=lambda: deque(maxlen=_NUM_SNAPSHOTS))
    equal: set[str] = field(default_factory=set)

    def look(self, shown: Tables, said: Tables) -> None:
        self._said.append(said)
        known = list(self._said)
        if any(shown["workers"] and _worker_texts(one["workers"]) == _cut(shown["workers"]) for one in known):
            self.equal.add("workers")
        if shown["sequences"] and _sequences_equal(shown["sequences"], [one["sequences"] for one in known]):
            self.equal.add("sequences")
        if any(shown["tenants"] and tenants_equal(shown["tenants"], one["tenants"]) for one in known):
            self.equal.add("tenants")


def _cut(shown: Sequence[Row]) -> list[Row]:
    return [{name: line.get(heading) for heading, name in _WORKERS.items()} for line in shown]


def _worker_texts(rows: Sequence[Row]) -> list[Row]:
    return [{name: str(row[name]) for name in _WORKERS.values()} for row in rows]


def _sequences_equal(shown: Sequence[Row], said: Sequence[Sequence[Row]]) -> bool:
    names = [{name: line[heading] for heading, name in _SEQUENCES.items()} for line in shown]
    if not any([{name: row[name] for name in _SEQUENCES.values()} for row in rows] == names for rows in said):
        return False
    for line in shown:
        seen = [row for rows in said for row in rows if row["id"] == line["request"]]
        if not _within(line["tokens"], [row["output_tokens"] for row in seen], 0.0):
            return False
        if not _within(line["lasts"].removesuffix(" s"), [row["seconds"] for row in seen], 0.1):
            return False
        if not _within(line["acceptance"], [row["acceptance"] for row in seen], _ROUNDED):
            return False
    return True


def _within(text: str, said: Sequence[float | None], tolerance: float) -> bool:
    """A dash stands for no number."""
    if text == "–":
        return None in said
    numbers = [value for value in said if value is not None]
    return bool(numbers) and min(numbers) - tolerance <= float(text) <= max(numbers) + tolerance


def tenants_equal(shown: Sequence[Row], said: Sequence[Row]) -> bool:
    """Mode, price, reason and speed with its interval, of each tenant at each target."""
    return len(shown) == len(said) and all(_tenant_equal(line, row) for line, row in zip(shown, said, strict=True))


def _tenant_equal(line: Row, row: Mapping[str, Any]) -> bool:
    if line["tenant"] != row["tenant"]:
        return False
    if "mode" not in row:
        return bool(line["speculation"] == line["row price"] == "–" and not line["why"])
    why = _WHY.fullmatch(line["why"])
    if why is None or (line["speculation"], line["target"], why[1]) != (row["mode"], row["target"], row["reason"]):
        return False
    speeds = (row["times_plain"], *row["times_plain_interval"])
    pairs = [(line["row price"], row["price"]), *zip(why.groups()[1:], speeds, strict=True)]
    return all(_within(text, [value], _ROUNDED) for text, value in pairs)
