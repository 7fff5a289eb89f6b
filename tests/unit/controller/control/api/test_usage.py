"""What is asked of the bill, and what is refused."""

from __future__ import annotations

import pytest
from outrider.errors import InvalidRequest
from outrider.metadata.tenants.ledger import LedgerEntry, TenantUsage
from outrider.rpc.v1 import usage_pb2 as usage
from outrider_controller.control.api.usage import Bills

NOW_S = 100 * 86_400 + 1800
HOUR = NOW_S // 3600


class FakeLedger:
    def __init__(self, *entries: LedgerEntry) -> None:
        self.entries = entries

    async def read(self, first_hour: int, last_hour: int, tenant: str = "") -> list[LedgerEntry]:
        return [e for e in self.entries if first_hour <= e.hour <= last_hour and tenant in ("", e.tenant)]


def entry(hours_ago: int, tenant: str = "a", tokens: int = 1) -> LedgerEntry:
    return LedgerEntry(HOUR - hours_ago, tenant, TenantUsage(output_tokens=tokens))


async def ask(*entries: LedgerEntry, **request: object) -> list[tuple[int, str, int]]:
    asked = usage.GetUsageRequest(**request)  # type: ignore[arg-type]
    answer = await Bills(FakeLedger(*entries), lambda: NOW_S).GetUsage(asked, None)
    return [((NOW_S - row.start_unix_s) // 3600, row.tenant, row.usage.output_tokens) for row in answer.rows]


async def test_unless_told_otherwise_all_tenants_of_the_last_day_have_a_row() -> None:
    found = await ask(entry(0), entry(0), entry(3), entry(24, "b"), entry(30))
    assert found == [(24, "a", 3), (24, "b", 1)]


async def test_hours_and_days_have_rows_of_their_own() -> None:
    entries = [entry(0), entry(1), entry(1, tokens=4), entry(25)]
    since = NOW_S - 30 * 3600
    by_hour = await ask(*entries, by=usage.USAGE_INTERVAL_HOUR, since_unix_s=since)
    assert by_hour == [(25, "a", 1), (1, "a", 5), (0, "a", 1)]
    assert await ask(*entries, by=usage.USAGE_INTERVAL_DAY, since_unix_s=since) == [
        (48, "a", 1),
        (24, "a", 5),
        (0, "a", 1),
    ]


async def test_one_tenant_and_a_time_that_is_over_can_be_asked_for() -> None:
    entries = [entry(5), entry(6), entry(6, "b")]
    found = await ask(*entries, tenant="a", since_unix_s=NOW_S - 6 * 3600, until_unix_s=NOW_S - 5 * 3600 - 1800)
    assert found == [(6, "a", 1)]


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"tenant": "x" * 129}, "tenant"),
        ({"by": 9}, "by"),
        ({"since_unix_s": NOW_S + 10}, "since_unix_s"),
        ({"since_unix_s": 1}, "since_unix_s"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_its_field(request_fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await ask(**request_fields)
    assert refused.value.field == field


async def test_an_answer_of_too_many_rows_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="10001 rows"):
        await ask(*(entry(0, f"t{number}") for number in range(10_001)))
