"""A trace for people: a header, one line a round, what happened in between, and where the time went. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outrider.rpc.v1 import trace_pb2 as trace
from outrider.rpc.v1 import worker_pb2 as worker

from outrider_controller.cli.show.trace.rows import by_source, event_row, round_row, state, totals, trace_row
from outrider_controller.cli.show.trace.tokens import TokenPainter

Row = dict[str, Any]

# Field, heading, width.
_COLUMNS = (
    ("round", "round", 5),
    ("position", "pos", 5),
    ("drafted", "K", 3),
    ("verified", "ver", 3),
    ("accepted", "acc", 3),
    ("dropped_stale", "stale", 5),
    ("wait_ms", "wait", 6),
    ("draft_queue_ms", "d-queue", 7),
    ("draft_ms", "draft", 6),
    ("wire_ms", "wire", 6),
    ("queue_ms", "queue", 6),
    ("prefill_ms", "prefill", 7),
    ("verify_ms", "verify", 6),
    ("round_ms", "total", 6),
)
LEGEND = (
    "K drafted, ver verified, acc accepted, stale dropped; times in ms, total = wait + queue + prefill + verify + rest"
)
# Shown only where they say something.
_OPTIONAL = {"draft_queue_ms": 0.5, "prefill_ms": 0.05}
_LEFT_OUT = "-"


class Table:
    """Draws the rounds of one or several parts of a request; they may come bit by bit."""

    def __init__(self, painter: TokenPainter, shown: Sequence[trace.RoundTrace] | None = None) -> None:
        """`shown`: all rounds there will be, to leave out columns without a figure; None keeps every column."""
        self._painter = painter
        self._columns = [column for column in _COLUMNS if shown is None or _says_something(column[0], shown)]

    @property
    def legend(self) -> str:
        return self._painter.legend

    def heading(self) -> str:
        return " ".join([*(title.rjust(width) for _, title, width in self._columns), " tokens"])

    def line(self, index: int, one: trace.RoundTrace) -> str:
        row = round_row(index, one)
        return " ".join([*self._cells(row, one.num_drafted > 0), " " + self._painter.paint(one)])

    def sums(self, rounds: Sequence[trace.RoundTrace]) -> str:
        row = {"round": "sum", "position": "", **totals(rounds)}
        return " ".join([*self._cells(row, True), f" {row['tokens']} tokens"])

    def _cells(self, row: Row, drafted: bool) -> Iterator[str]:
        for name, _, width in self._columns:
            value = row[name]
            if name in ("draft_queue_ms", "draft_ms") and not drafted:
                value = _LEFT_OUT
            yield (f"{value:.1f}" if isinstance(value, float) else str(value)).rjust(width)


def _says_something(name: str, rounds: Sequence[trace.RoundTrace]) -> bool:
    return name not in _OPTIONAL or any(round_row(0, one)[name] >= _OPTIONAL[name] for one in rounds)


def header(part: trace.RequestTrace) -> list[str]:
    """What was asked, and of whom."""
    row = trace_row(part)
    first = [f"request {part.request_id}", part.model, row["verification"], f"speculation {row['speculation']}"]
    lines = ["   ".join(first) + (f"   trace {part.trace_id}" if part.trace_id else "")]
    workers = [_worker(event_row(event)) for event in _first_opened(part)]
    lines.append("   ".join([*workers, f"router {part.router_id}"]))
    prompt = f"prompt {part.prompt_tokens} tokens" + (
        f", {part.cached_tokens} of them cached" if part.cached_tokens else ""
    )
    lines.append(prompt + (f"   resumed after {part.resumed_tokens} tokens" if part.resumed_tokens else ""))
    return lines


def _first_opened(part: trace.RequestTrace) -> list[trace.TraceEvent]:
    """Where the request began: target, then draft."""
    opened = [event for event in part.events if event.kind == trace.TRACE_EVENT_KIND_OPENED]
    first = {event.role: event for event in reversed(opened)}
    return [first[role] for role in (worker.WORKER_ROLE_TARGET, worker.WORKER_ROLE_DRAFT) if role in first]


def _worker(event: Row) -> str:
    model = f" ({event['model']})" if event["role"] == "draft" else ""
    return f"{event['role']} {event['worker']}{model}"


def summary(part: trace.RequestTrace) -> list[str]:
    """What came of it, and where the time went."""
    row = trace_row(part)
    lines = [_outcome(part, row)]
    if part.rounds:
        lines += [_first_token(part), _time(part)]
    if row["verified"]:
        lines += [_drafts(row), *_by_source(by_source(part.rounds))]
    if part.num_rounds_omitted:
        lines.append(f"{part.num_rounds_omitted} later rounds were not recorded")
    return lines


def _outcome(part: trace.RequestTrace, row: Row) -> str:
    rate = part.output_tokens / (part.duration_us / 1e6) if part.duration_us else 0.0
    how = {"running": "still running", "cancelled": "ended early", "CANCELLED": "ended by the gateway"}
    ending = how.get(state(part), f"ended by {state(part)}")
    return (
        f"{part.output_tokens} tokens in {row['num_rounds']} rounds and {row['duration_ms']:.1f} ms "
        f"({rate:.1f} tokens/s); {ending}"
    )


def _first_token(part: trace.RequestTrace) -> str:
    one = round_row(0, part.rounds[0])
    parts = {
        "placing": part.placing_us / 1000,
        "queue": one["queue_ms"] + one["wait_ms"],
        "prefill": one["prefill_ms"] + one["verify_ms"],
        "wire": one["wire_ms"],
    }
    return f"first token after {one['at_ms']:.1f} ms: " + _parts(parts)


def _time(part: trace.RequestTrace) -> str:
    sums = totals(part.rounds[1:])
    total_ms = sums["round_ms"]
    if not total_ms:
        return "no round after the first"
    parts = {"verify": sums["verify_ms"], "waiting for drafts": sums["wait_ms"], "queue": sums["queue_ms"]}
    parts |= {"prefill": sums["prefill_ms"]} if sums["prefill_ms"] else {}
    parts["rest"] = max(0.0, total_ms - sum(parts.values()))
    shares = ", ".join(f"{name} {value:.1f} ({value / total_ms:.0%})" for name, value in parts.items())
    return f"rounds after it {total_ms:.1f} ms: {shares}"


def _drafts(row: Row) -> str:
    return (
        f"drafts: {row['drafted']} drafted, {row['verified']} verified, {row['accepted']} accepted "
        f"({row['accepted'] / row['verified']:.0%} of verified), {row['dropped_stale']} dropped stale; "
        f"{row['output_tokens'] / max(1, row['num_rounds']):.2f} tokens a round"
    )


def _by_source(sums: dict[str, list[int]]) -> list[str]:
    """Nothing where one source made all drafts."""
    if len(sums) < 2:
        return []
    each = (f"{name} {drafted}, {verified}, {accepted}" for name, (drafted, verified, accepted) in sums.items())
    return ["drafted, verified, accepted of " + "; ".join(each)]


def _parts(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in parts.items())


def event_line(event: trace.TraceEvent) -> str:
    row = event_row(event)
    why = f" ({row['reason']})" if row["reason"] else ""
    return f"{'--':>5} {row['position']:>5} {row['role']} {row['worker']} {row['event']}{why} at {row['at_ms']:.1f} ms"


def interleaved(part: trace.RequestTrace, since: int = 0) -> Iterator[trace.RoundTrace | trace.TraceEvent]:
    """Rounds and events in order of time, from item `since` on. What is in the header is left out."""
    shown = _first_opened(part)
    events = [event for event in part.events if event not in shown]
    items: list[trace.RoundTrace | trace.TraceEvent] = sorted([*part.rounds, *events], key=lambda item: item.at_us)
    yield from items[since:]
