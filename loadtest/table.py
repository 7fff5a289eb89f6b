"""The report at the end of a test, as a table and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider_controller.cli.output import columns, write_json

from loadtest.outcomes import Report
from loadtest.settings import Profile
from loadtest.shapes import Threshold
from loadtest.verdict import Happened, failures

_BUSY_CLIENT = 0.8
_TIMES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")


def table(report: Report, profile: Profile, happened: Happened) -> str:
    """One line per tenant, with notes on how to read them."""
    times = [name.removesuffix("_ms").upper() for name in _TIMES]
    header = ["TENANT", "REQ", "FAILED", "REQ/S", "TOK/S", *(f"{name} P50 / P99 MS" for name in times)]
    rows = [_cells(row) for row in report.rows]
    lines = [
        "",
        columns([*header, "CACHED", "ACCEPTED", "TOK/ROUND", "GOOD", "GOOD REQ/S"], rows),
        "",
        f"SLO: {report.slo}. {report.seconds:.0f} s after a warm-up of {profile.warm_up_s:g} s.",
        *(f"failed {count} times: {error}" for error, count in sorted(report.errors.items())),
    ]
    if profile.faults:
        lines.append(f"killed: {', '.join(happened.killed) or 'nobody'}")
    if isinstance(profile.shape, Threshold):
        lines.append(
            f"most users with {profile.shape.min_goodput:.0%} of requests within the SLO: {profile.shape.held}"
        )
    busy = max(happened.cpus, default=0.0) > _BUSY_CLIENT
    advice = ": too busy to measure with; run Locust on several processes" if busy else ""
    lines.append(f"this client took {sum(happened.cpus):.0%} of a core{advice}")
    lines += [f"FAILED: {reason}" for reason in failures(report, profile, happened)]
    return "\n".join(lines)


def write_report(file: str, report: Report, profile: Profile, happened: Happened) -> None:
    """Does nothing without a file."""
    held = profile.shape.held if isinstance(profile.shape, Threshold) else None
    body = {
        "profile": profile.name,
        **report.as_json(),
        "killed": list(happened.killed),
        "users_held": held,
        "client_cpu": round(sum(happened.cpus), 3),
        "client_processes": len(happened.cpus),
        "failures": failures(report, profile, happened),
    }
    write_json(Path(file) if file else None, "loadtest", body)


def _cells(row: dict[str, Any]) -> list[str]:
    times = [f"{row[f'{name}_p50']:.0f} / {row[f'{name}_p99']:.0f}" for name in _TIMES]
    counts = [str(row["requests"]), str(row["failed"]), f"{row['requests_per_s']:.2f}", f"{row['tokens_per_s']:.1f}"]
    length = row["tokens_per_round"]
    shares = [
        f"{row['cached']:.0%}",
        f"{row['accepted']:.0%}",
        "-" if length is None else f"{length:.2f}",
        f"{row['goodput']:.0%}",
    ]
    return [row["tenant"], *counts, *times, *shares, f"{row['good_requests_per_s']:.2f}"]
