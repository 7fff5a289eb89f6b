"""The outcome of each request, and figures over many. Pure.

TTFT: from sending to the first token. ITL: between two messages, each with one or more tokens. TPOT: from first to
last token, divided by the tokens after the first. Goodput: requests that meet the SLO.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request, by the client's clock."""

    tenant: str
    sent_s: float
    """Unix time."""
    error: str = ""
    """Empty for a complete answer."""
    ttft_ms: float = 0.0
    e2e_ms: float = 0.0
    itl_ms: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    verified_tokens: int = 0
    accepted_tokens: int = 0
    drafted_rounds: int = 0
    """Rounds with drafted tokens."""

    @property
    def tpot_ms(self) -> float:
        return (self.e2e_ms - self.ttft_ms) / max(1, self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds that a request must all meet to count as goodput."""

    ttft_ms: float = math.inf
    tpot_ms: float = math.inf
    e2e_ms: float = math.inf

    def __post_init__(self) -> None:
        if not min(self.ttft_ms, self.tpot_ms, self.e2e_ms) > 0:
            raise ValueError("ttft_ms, tpot_ms, e2e_ms: must be above 0")

    def met(self, outcome: Outcome) -> bool:
        return (
            not outcome.error
            and outcome.ttft_ms <= self.ttft_ms
            and outcome.tpot_ms <= self.tpot_ms
            and outcome.e2e_ms <= self.e2e_ms
        )

    def __str__(self) -> str:
        limits = {"TTFT": self.ttft_ms, "TPOT": self.tpot_ms, "E2E": self.e2e_ms}
        return ", ".join(f"{name} <= {limit:g} ms" for name, limit in limits.items() if limit < math.inf) or "none"


def goodput(outcomes: Sequence[Outcome], slo: Slo) -> float:
    """Share of the requests that met the SLO, 0 to 1; 1 without requests. A failed request never meets it."""
    return sum(map(slo.met, outcomes)) / len(outcomes) if outcomes else 1.0


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a test: one row per tenant, and one for all."""

    slo: Slo
    seconds: float
    rows: tuple[dict[str, Any], ...]
    errors: dict[str, int]

    @property
    def total(self) -> dict[str, Any]:
        return self.rows[-1]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], slo: Slo, begin_s: float, end_s: float) -> Report:
        """Figures from the end of warm-up to the end of the load, as Unix time. A failure counts in the warm-up too."""
        outcomes = [one for one in outcomes if one.error or one.sent_s >= begin_s]
        # The last answers come after the load; without their time the rates would be too high.
        seconds = max([end_s, *(one.sent_s + one.e2e_ms / 1e3 for one in outcomes)]) - begin_s
        tenants = sorted({outcome.tenant for outcome in outcomes})
        groups = [(tenant, [one for one in outcomes if one.tenant == tenant]) for tenant in tenants]
        rows = tuple(_row(name, group, slo, seconds) for name, group in [*groups, ("all", outcomes)])
        return cls(slo, seconds, rows, _counted(one.error for one in outcomes if one.error))

    def as_json(self) -> dict[str, Any]:
        limits = {name: getattr(self.slo, name) for name in ("ttft_ms", "tpot_ms", "e2e_ms")}
        slo = {name: limit for name, limit in limits.items() if limit < math.inf}
        return {"slo": slo, "seconds": round(self.seconds, 1), "rows": list(self.rows), "errors": self.errors}


def _row(name: str, outcomes: Sequence[Outcome], slo: Slo, seconds: float) -> dict[str, Any]:
    answered = [one for one in outcomes if not one.error]
    prompt, verified = sum(one.prompt_tokens for one in answered), sum(one.verified_tokens for one in answered)
    share = goodput(outcomes, slo)
    return {
        "tenant": name,
        "requests": len(outcomes),
        "failed": len(outcomes) - len(answered),
        "requests_per_s": _per(len(answered), seconds),
        "tokens_per_s": _per(sum(one.completion_tokens for one in answered), seconds),
        **_percentiles("ttft_ms", [one.ttft_ms for one in answered]),
        **_percentiles("itl_ms", [gap for one in answered for gap in one.itl_ms]),
        **_percentiles("tpot_ms", [one.tpot_ms for one in answered]),
        **_percentiles("e2e_ms", [one.e2e_ms for one in answered]),
        "cached": _per(sum(one.cached_tokens for one in answered), prompt),
        "accepted": _per(sum(one.accepted_tokens for one in answered), verified),
        "tokens_per_round": _acceptance_length(answered),
        "goodput": round(share, 4),
        "good_requests_per_s": _per(share * len(outcomes), seconds),
    }


def _acceptance_length(answered: Sequence[Outcome]) -> float | None:
    """Tokens of a round with drafted tokens, the target's own included. None without such rounds."""
    reported = [one for one in answered if one.drafted_rounds]
    rounds = sum(one.drafted_rounds for one in reported)
    return round(1 + sum(one.accepted_tokens for one in reported) / rounds, 3) if rounds else None


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99]) if values else (0.0, 0.0)
    return {f"{name}_p50": round(float(p50), 1), f"{name}_p99": round(float(p99), 1)}


def _per(amount: float, of: float) -> float:
    return round(amount / of, 3) if of else 0.0


def _counted(errors: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for error in errors:
        counts[error] = counts.get(error, 0) + 1
    return counts
