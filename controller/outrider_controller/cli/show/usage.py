"""outrider get usage"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click
from outrider.rpc.v1 import usage_pb2

from outrider_controller.cli.asking import span_option
from outrider_controller.cli.clusters.control import Control, ask_control
from outrider_controller.cli.output import moment
from outrider_controller.cli.watching import list_options, show_rows

_INTERVALS = {"total": 0, "hour": usage_pb2.USAGE_INTERVAL_HOUR, "day": usage_pb2.USAGE_INTERVAL_DAY}
_TOKENS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
_DRAFTED = ("drafted_tokens", "verified_tokens", "accepted_tokens")
_TIMES = ("target_useful_s", "target_wasted_s", "draft_useful_s", "draft_wasted_s")
COLUMNS = (*_TOKENS, "target_s", "draft_s")
BRIEF = tuple(column for column in COLUMNS if column != "cached_tokens")
"""Next to a time."""
since_option = span_option("--since", "since_s", "24h", "Begin this long ago.", least_s=1)


@click.command("usage")
@click.argument("tenant", default="", metavar="[TENANT]")
@since_option
@click.option("--by", type=click.Choice(list(_INTERVALS)), default="total", show_default=True, help="One row for each.")
@list_options
def get_usage(tenant: str, since_s: int, by: str, watch: bool, control: str, output: str) -> None:
    """What tenants have used: tokens, and the time of targets and drafts that they took.

    Hours are whole: the one that --since falls into is the first. Times are in seconds. Useful is what accepted
    and other output tokens took, wasted are rows and drafts that came to nothing.

    What a server that takes its requests itself says that it served has rows of its own, which name it.
    """
    key = ("tenant", "server") if by == "total" else ("tenant", "server", "since")
    brief = COLUMNS if by == "total" else BRIEF
    shown = (*key, *_TOKENS, *_DRAFTED, "by_source", *_TIMES) if output == "wide" else (*key, *brief)

    def read() -> list[dict[str, Any]]:
        return ask_control(control, lambda stub: usage_rows(stub, tenant, since_s, by))

    show_rows("usage", read, shown, output, watch=watch, key=key)


async def usage_rows(stub: Control, tenant: str, since_s: int, by: str) -> list[dict[str, Any]]:
    """A row for each tenant and interval."""
    interval = usage_pb2.UsageInterval.ValueType(_INTERVALS[by])
    since = max(1, int(time.time()) - since_s)
    answer = await stub.GetUsage(usage_pb2.GetUsageRequest(tenant=tenant, since_unix_s=since, by=interval))
    return [usage_row(row) for row in answer.rows]


def usage_row(row: usage_pb2.UsageRow) -> dict[str, Any]:
    used = row.usage
    times = {name: getattr(used, name.removesuffix("s") + "us") / 1e6 for name in _TIMES}
    return {
        "tenant": row.tenant,
        "server": row.server,
        "since": moment(row.start_unix_s),
        **{name: getattr(used, name) for name in (*_TOKENS, *_DRAFTED)},
        "sources": {one.source: _of_source(one) for one in used.sources},
        "by_source": ", ".join(map(_source_text, used.sources)),
        "target_s": times["target_useful_s"] + times["target_wasted_s"],
        "draft_s": times["draft_useful_s"] + times["draft_wasted_s"],
        **times,
    }


def _of_source(one: usage_pb2.SourceUsage) -> dict[str, float]:
    times = {"target_s": one.target_us / 1e6, "draft_s": one.draft_us / 1e6}
    return {**{name: getattr(one, name) for name in _DRAFTED}, **times}


def _source_text(one: usage_pb2.SourceUsage) -> str:
    seconds = (one.target_us + one.draft_us) / 1e6
    return f"{one.source} {one.accepted_tokens}/{one.verified_tokens} {seconds:.1f} s"


def shares(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Of a row's tokens and times; None where there were none."""
    return {
        "cached_share": _share(row["cached_tokens"], row["prompt_tokens"]),
        "acceptance": _share(row["accepted_tokens"], row["verified_tokens"]),
        "target_wasted_share": _share(row["target_wasted_s"], row["target_s"]),
        "draft_wasted_share": _share(row["draft_wasted_s"], row["draft_s"]),
    }


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if whole else None
