"""python -m benchmarks overload"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import psutil
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.stack_options import run_async

from benchmarks import report
from benchmarks.support.open_loop import Client, Ended, client, percentile_ms
from benchmarks.support.paced_stack import PacedStack, paced_stack

_TARGETS, _PLACES = 2, 8
_SETTLE_S = 3.0
_QUEUE_TIMEOUT_S = 4.0
_MAX_REFUSAL_MS, _MIN_GOODPUT, _MAX_GROWTH_MIB = 50.0, 0.9, 16.0


@dataclass(frozen=True, slots=True)
class Load:
    """The results of the requests at one rate."""

    factor: float
    offered: float
    """Requests per second."""
    goodput: float
    """Answers per second, after the settling time."""
    codes: dict[str, int]
    refused_p50_ms: float | None
    refused_p99_ms: float | None
    without_retry_after: int
    first_token_p99_ms: float | None
    late_p99_ms: float | None
    """Delay of the client between due and sent."""
    memory_mib: dict[str, float]

    def problems(self, peak: float) -> list[str]:
        found = []
        if self.factor >= 2 and self.goodput < _MIN_GOODPUT * peak:
            found.append(f"{self.factor:g} x: goodput is {self.goodput / peak:.2f} of the peak")
        if self.refused_p99_ms is not None and self.refused_p99_ms > _MAX_REFUSAL_MS:
            found.append(f"{self.factor:g} x: refusals take {self.refused_p99_ms} ms at p99")
        if self.without_retry_after:
            found.append(f"{self.factor:g} x: {self.without_retry_after} refusals without a retry-after")
        if other := {code for code in self.codes if code not in ("OK", "RESOURCE_EXHAUSTED")}:
            found.append(f"{self.factor:g} x: some ended as {', '.join(sorted(other))}")
        return found


def _numbers(_: click.Context, __: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in value.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) <= 0 or max(numbers) > 100:
        raise click.BadParameter("numbers above 0, at most 100, with commas between them")
    return numbers


@click.command("overload")
@click.option("--times", default="1,2,5,10", show_default=True, callback=_numbers, metavar="N,N,…", help="What fits.")
@click.option("--seconds", type=click.FloatRange(1), default=10.0, show_default=True, help="Of each load.")
@json_file_option
def overload(times: tuple[float, ...], seconds: float, json_file: Path | None) -> int:
    """What do clients see when more comes than fits?

    A real gateway, router and Redis before two paced targets of eight places each, whose steps take 10 ms and 2 ms
    more for each row. First as many streams as there are places, which tells what fits; then requests at random times,
    so many times that, whether or not those before have ended.
    """
    return run_async(_overload(times, seconds, json_file))


async def _overload(times: Sequence[float], seconds: float, json_file: Path | None) -> int:
    before = psutil.cpu_times()
    async with (
        paced_stack(_TARGETS, _PLACES, _QUEUE_TIMEOUT_S) as stack,
        client(stack.address) as asking,
    ):
        fits = await _fits(asking, stack.places, seconds)
        note(f"{fits:.1f} requests/s fit")
        loads = []
        for factor in times:
            loads.append(await _load(asking, stack, factor, fits, seconds))
            note(f"{factor:g} x: {loads[-1].goodput:.1f} answers/s, {loads[-1].codes}")
    stolen_s = getattr(psutil.cpu_times(), "steal", 0.0) - getattr(before, "steal", 0.0)
    peak = max(fits, *(load.goodput for load in loads))
    growth = {name: loads[-1].memory_mib[name] - loads[0].memory_mib[name] for name in loads[0].memory_mib}
    problems = [problem for load in loads for problem in load.problems(peak)]
    problems += [f"the {name} grew by {mib:.0f} MiB" for name, mib in growth.items() if mib > _MAX_GROWTH_MIB]
    report.show(
        report.table([_cells(load, peak) for load in loads]),
        "memory, from the first load to the last: "
        + ", ".join(f"{name} {mib:+.1f} MiB" for name, mib in growth.items())
        + f"; CPU time that the host took: {stolen_s:.1f} s",
        "\n".join(problems),
    )
    body = {"holds": not problems, "problems": problems, "fits": fits, "peak": peak, "growth_mib": growth}
    body |= {"stolen_s": stolen_s}
    return report.finish("overload", {**body, "loads": [asdict(load) for load in loads]}, json_file)


async def _fits(asking: Client, places: int, seconds: float) -> float:
    started_s = time.monotonic()
    return _goodput(await asking.closed_loop(places, _SETTLE_S + seconds), started_s, seconds)


async def _load(asking: Client, stack: PacedStack, factor: float, fits: float, seconds: float) -> Load:
    started_s = time.monotonic()
    ended = await asking.open_loop(factor * fits, _SETTLE_S + seconds)
    refused = [one for one in ended if one.code == "RESOURCE_EXHAUSTED"]
    took_s = [one.took_s for one in refused]
    return Load(
        factor=factor,
        offered=round(factor * fits, 1),
        goodput=round(_goodput(ended, started_s, seconds), 2),
        codes=dict(Counter(one.code for one in ended)),
        refused_p50_ms=percentile_ms(took_s, 0.5),
        refused_p99_ms=percentile_ms(took_s, 0.99),
        without_retry_after=sum(not one.retry_after_s for one in refused),
        first_token_p99_ms=percentile_ms([one.first_token_s for one in ended if one.first_token_s is not None], 0.99),
        late_p99_ms=percentile_ms([one.late_s for one in ended], 0.99),
        memory_mib={name: round(mib, 1) for name, mib in stack.memory_mib().items()},
    )


def _goodput(ended: Sequence[Ended], started_s: float, seconds: float) -> float:
    """Answers per second, between the settling time and the last request."""
    since_s = started_s + _SETTLE_S
    return sum(one.code == "OK" and since_s <= one.at_s < since_s + seconds for one in ended) / seconds


def _cells(load: Load, peak: float) -> dict[str, Any]:
    codes = ", ".join(f"{code} {count}" for code, count in sorted(load.codes.items()))
    return {
        "x": f"{load.factor:g}",
        "requests/s": load.offered,
        "answers/s": load.goodput,
        "of the peak": f"{load.goodput / peak:.2f}",
        "refused p50 ms": load.refused_p50_ms,
        "p99": load.refused_p99_ms,
        "first token p99 ms": load.first_token_p99_ms,
        "sent late p99 ms": load.late_p99_ms,
        "ends": codes,
    }
