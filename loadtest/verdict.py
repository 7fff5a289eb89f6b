"""Whether a test passed, by its requests and by what else happened in it. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.outcomes import Report
from loadtest.settings import Faults, Profile


@dataclass(frozen=True, slots=True)
class Happened:
    """What happened in a test, apart from its requests."""

    load_s: float
    """From its start until users were no longer wanted."""
    killed: Sequence[str] = ()
    """Role and id of each killed worker."""
    crashes: Sequence[str] = ()
    """Message of each exception that a user did not catch."""
    cpus: Sequence[float] = ()
    """Cores that each process of this client used."""
    num_lost: int = 0
    """Processes of this client whose last requests are not known."""


def failures(report: Report, profile: Profile, happened: Happened) -> list[str]:
    """Why the test failed; nothing if it passed."""
    total = report.total
    reasons = [
        (f"requests failed: {total['failed']}", total["failed"]),
        (f"processes of this client that were lost: {happened.num_lost}", happened.num_lost),
        ("no request was sent after the warm-up", not total["requests"]),
        (
            f"goodput is {total['goodput']:.1%}, not {profile.min_goodput:.1%}",
            total["goodput"] < profile.min_goodput,
        ),
        *((f"users crashed {count} times: {message}", True) for message, count in Counter(happened.crashes).items()),
        *((reason, True) for reason in _spared(profile.faults, happened)),
    ]
    return [reason for reason, applies in reasons if applies]


def _spared(faults: Faults | None, happened: Happened) -> list[str]:
    if faults is None:
        return []
    # One less than its time has room for: a role may have no worker just then.
    wanted, killed = max(0, math.floor(happened.load_s / faults.every_s) - 1), len(happened.killed)
    reasons = [f"killed: {killed}, not {wanted}"] if killed < wanted else []
    roles = {one.split()[0] for one in happened.killed}
    return reasons + [f"no {role} was killed" for role in dict.fromkeys(faults.roles) if role not in roles]
