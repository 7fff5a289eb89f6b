"""Two sides of one bill: what workers count themselves, and what routers counted of what they were told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.draft.events import DraftStats
from outrider.metadata.tenants.ledger import TenantUsage
from outrider.target.requests.report import TargetStats


def spent(targets: Sequence[TargetStats], drafts: Sequence[DraftStats]) -> dict[str, float]:
    return {
        "output_tokens": sum(s.num_committed_tokens for s in targets),
        "drafted_tokens": sum(s.num_draft_tokens + s.num_branch_tokens for s in targets),
        "verified_tokens": sum(s.num_verified_tokens + s.num_branch_tokens for s in targets),
        "accepted_tokens": sum(s.num_accepted_tokens for s in targets),
        "target_us": sum(s.busy_s for s in targets) * 1e6,
        "target_wasted_us": sum(s.wasted_s for s in targets) * 1e6,
        "draft_us": sum(s.busy_s for s in drafts) * 1e6,
    }


def billed(tenants: Iterable[TenantUsage]) -> dict[str, float]:
    total = TenantUsage()
    for each in tenants:
        total.add(each)
    return {
        "output_tokens": total.output_tokens,
        "drafted_tokens": total.drafted_tokens,
        "verified_tokens": total.verified_tokens,
        "accepted_tokens": total.accepted_tokens,
        "target_us": total.target_useful_us + total.target_wasted_us,
        "target_wasted_us": total.target_wasted_us,
        "draft_us": total.draft_useful_us + total.draft_wasted_us,
    }
