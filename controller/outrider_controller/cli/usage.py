"""outrider get usage"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click
from outrider.rpc.v1 import usage_pb2

from outrider_controller.cli.control import ask_control, control_option
from outrider_controller.cli.output import moment, output_option, print_rows

_INTERVALS = {"total": 0, "hour": usage_pb2.USAGE_INTERVAL_HOUR, "day": usage_pb2.USAGE_INTERVAL_DAY}
_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_TOKENS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
_DRAFTED = ("drafted_tokens", "verified_tokens", "accepted_tokens")
_TIMES = ("target_useful_s", "target_wasted_s", "draft_useful_s", "draft_wasted_s")

F = TypeVar("F", bound=Callable[..., Any])


def _ago(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Seconds."""
    match = re.fullmatch(r"(\d{1,6})([mhd])", value)
    if match is None or not int(match[1]):
        raise click.BadParameter(f"{value!r} is not a time like 30m, 24h or 7d")
    return int(match[1]) * _UNITS[match[2]]


@click.command("usage")
@click.argument("tenant", default="", metavar="[TENANT]")
@click.option("--since", callback=_ago, default="24h", show_default=True, metavar="TIME", help="From so long ago on.")
@click.option("--by", type=click.Choice(list(_INTERVALS)), default="total", show_default=True, help="A row for each.")
@control_option
@output_option("table", "wide", "json", "yaml")
def get_usage(tenant: str, since: int, by: str, control: str, output: str) -> None:
    """What tenants have used: tokens, and the time of targets and drafts that they took.

    Hours are whole: the one that --since falls into is the first. Times are in seconds. Useful is what accepted
    and other output tokens took, wasted are rows and drafts that came to nothing.
    """
    interval = usage_pb2.UsageInterval.ValueType(_INTERVALS[by])
    request = usage_pb2.GetUsageRequest(tenant=tenant, since_unix_s=max(1, int(time.time()) - since), by=interval)
    rows = [_row(row) for row in ask_control(control, lambda stub: stub.GetUsage(request)).rows]
    shown = ("tenant", "since", *_TOKENS) if by != "total" else ("tenant", *_TOKENS)
    shown = (*shown, *_DRAFTED, *_TIMES) if output == "wide" else (*shown, "target_s", "draft_s")
    print_rows("usage", "usage", rows, shown, output)


def _row(row: usage_pb2.UsageRow) -> dict[str, Any]:
    used = row.usage
    times = {name: getattr(used, name.removesuffix("s") + "us") / 1e6 for name in _TIMES}
    return {
        "tenant": row.tenant,
        "since": moment(row.start_unix_s),
        **{name: getattr(used, name) for name in (*_TOKENS, *_DRAFTED)},
        "target_s": times["target_useful_s"] + times["target_wasted_s"],
        "draft_s": times["draft_useful_s"] + times["draft_wasted_s"],
        **times,
    }
