"""outrider get drafts, delete draft, and rollout: versions of drafts, and how they come to requests."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from functools import partial
from typing import Any

import click
from outrider.rpc.enums import value_name
from outrider.rpc.v1 import control_pb2, drafts_pb2

from outrider_controller.autoscaler.rollout import (
    DEFAULT_SHARE,
    GIVE_UP_TOKENS,
    MAX_SHARE,
    MIN_REPORTS,
    PROMOTE_ABOVE,
    UNDO_BELOW,
)
from outrider_controller.cli.asking import NumberRange, confirm, yes_option
from outrider_controller.cli.clusters.control import Control, ask_control, control_options
from outrider_controller.cli.output import acceptance, emit, moment, named
from outrider_controller.cli.watching import list_options, show_rows

_TABLE = ("name", "kind", "stage", "workers", "acceptance", "revision", "first_seen")
_WIDE = (*_TABLE, "verified_tokens", "parent_revision", "version")


@click.command("drafts")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@list_options
def get_drafts(names: tuple[str, ...], watch: bool, control: str, output: str) -> None:
    """List the versions of drafts that workers run or have run.

    A `candidate` drafts for nobody until a rollout gives it requests; `released` drafts as the plan says.
    """

    def read() -> list[dict[str, Any]]:
        found = ask_control(control, lambda stub: stub.ListDrafts(control_pb2.ListDraftsRequest())).drafts
        return named(names, "draft", [draft_row(one) for one in found], "name")

    show_rows("drafts", read, _WIDE if output == "wide" else _TABLE, output, watch=watch, key=("version",))


def find(control: str, draft: str) -> drafts_pb2.DraftVersion:
    """The version that somebody means. Raises CommandError."""
    request = control_pb2.ListDraftsRequest(draft=draft)
    return ask_control(control, lambda stub: stub.ListDrafts(request)).drafts[0]


def draft_row(one: drafts_pb2.DraftVersion) -> dict[str, Any]:
    state = state_of(one.rollout) if one.HasField("rollout") else "candidate"
    return {
        "name": one.name,
        "kind": one.kind,
        "stage": state if one.candidate else "released",
        "workers": one.num_workers,
        "acceptance": acceptance(round(one.num_verified), round(one.num_accepted)),
        "verified_tokens": round(one.num_verified),
        "revision": one.revision,
        "parent_revision": one.parent_revision or None,
        "first_seen": moment(one.first_seen_unix_ms / 1000),
        "version": one.version,
    }


@click.command("draft")
@click.argument("drafts", nargs=-1, required=True, metavar="DRAFT...")
@yes_option
@control_options("text", "json", "yaml")
def delete_drafts(drafts: tuple[str, ...], yes: bool, control: str, output: str) -> None:
    """Forget versions of drafts that no worker runs, with their rollouts.

    Each by its name, or NAME@REVISION where there are several. The files of a draft stay where they are.
    """
    confirm(f"Delete {', '.join(drafts)} from the list of drafts?", yes)
    deleted = [ask_control(control, partial(_delete, draft)).draft.version for draft in drafts]
    emit("deleted-drafts", {"drafts": deleted}, output, "\n".join(f"{version} deleted" for version in deleted))


def _delete(draft: str, stub: Control) -> Awaitable[control_pb2.DeleteDraftResponse]:
    return stub.DeleteDraft(control_pb2.DeleteDraftRequest(draft=draft))


# -- rollouts


@click.group("rollout")
def rollout_group() -> None:
    """Release a version of a draft step by step, by what it saves.

    Its workers run next to the others (`outrider draft --candidate`). Once there is enough evidence, the control
    plane promotes it or takes its requests away.
    """


@rollout_group.command("start")
@click.argument("draft")
@click.option("--tenant", default="", help="Only for this tenant's requests; else for everybody's.")
@click.option(
    "--share",
    type=NumberRange(0, MAX_SHARE, min_open=True),
    default=DEFAULT_SHARE,
    show_default=True,
    metavar="PART",
    help="Of the requests that speculate, those for which it drafts.",
)
@control_options("text", "json", "yaml")
def start(draft: str, tenant: str, share: float, control: str, output: str) -> None:
    """Let DRAFT, a candidate, draft for a share of the requests until its evidence has decided.

    While it runs, another --share changes the share and keeps the evidence. DRAFT: a name, or NAME@REVISION.
    """
    request = control_pb2.StartRolloutRequest(draft=draft, tenant=tenant, share=share)
    _show(ask_control(control, lambda stub: stub.StartRollout(request)).rollout, output)


@rollout_group.command("status")
@click.argument("draft")
@control_options("text", "json", "yaml")
def status(draft: str, control: str, output: str) -> None:
    """Compare what DRAFT saves with the draft in use, with the confidence interval."""
    found = find(control, draft)
    if found.HasField("rollout"):
        _show(found.rollout, output)
    else:
        emit("rollout", {"rollout": None}, output, f"{found.version}: no rollout")


@rollout_group.command("promote")
@click.argument("draft")
@control_options("text", "json", "yaml")
def promote(draft: str, control: str, output: str) -> None:
    """Let DRAFT serve like any other version, whatever the evidence says."""
    _end(draft, control, output, promote=True)


@rollout_group.command("undo")
@click.argument("draft")
@control_options("text", "json", "yaml")
def undo(draft: str, control: str, output: str) -> None:
    """Take DRAFT's requests away again, those under way included; also after it was promoted."""
    _end(draft, control, output, promote=False)


def _end(draft: str, control: str, output: str, *, promote: bool) -> None:
    request = control_pb2.EndRolloutRequest(draft=draft, promote=promote)
    _show(ask_control(control, lambda stub: stub.EndRollout(request)).rollout, output)


def _show(rollout: drafts_pb2.Rollout, output: str) -> None:
    emit("rollout", {"rollout": rollout_row(rollout)}, output, "\n".join(rollout_lines(rollout)))


def state_of(rollout: drafts_pb2.Rollout) -> str:
    return value_name(drafts_pb2.RolloutState.DESCRIPTOR, rollout.state)


def rollout_row(rollout: drafts_pb2.Rollout) -> dict[str, Any]:
    evidence = rollout.evidence
    known = evidence.HasField("saving")
    return {
        "draft": rollout.draft,
        "tenant": rollout.tenant or None,
        "share": rollout.share,
        "state": state_of(rollout),
        "saving": round(evidence.saving, 4) if known else None,
        "interval": [round(evidence.lower, 4), round(evidence.upper, 4)] if known else None,
        "candidate_requests": round(evidence.candidate.requests),
        "candidate_tokens": round(evidence.candidate.tokens),
        "incumbent_requests": round(evidence.incumbent.requests),
        "incumbent_tokens": round(evidence.incumbent.tokens),
        "reason": rollout.reason,
        "by": rollout.by,
        "started": moment(rollout.started_unix_ms / 1000),
        "changed": moment(rollout.changed_unix_ms / 1000),
    }


def rollout_lines(rollout: drafts_pb2.Rollout) -> Iterator[str]:
    row = rollout_row(rollout)
    whom = f"tenant {row['tenant']}" if row["tenant"] else "all tenants"
    yield f"rollout of {row['draft']}: {row['state'].replace('_', ' ')}, {row['share']:.1%} of the requests of {whom}"
    yield f"  why      {row['reason']} ({row['by']}, {row['changed']})"
    yield f"  seen     {row['candidate_tokens']:,} tokens in {row['candidate_requests']:,} requests of the candidate"
    yield f"  beside   {row['incumbent_tokens']:,} tokens in {row['incumbent_requests']:,} requests of the draft in use"
    if row["interval"] is None:
        yield f"  saves    unknown: requests of both have to end in at least {MIN_REPORTS} seconds"
    else:
        low, high = row["interval"]
        yield f"  saves    {row['saving']:+.3f} plain rounds a token ({low:+.3f} to {high:+.3f}, 95 % at all times)"
    if rollout.state == drafts_pb2.ROLLOUT_STATE_RUNNING:
        bounds = f"promoted above {PROMOTE_ABOVE:g}, undone below {UNDO_BELOW:g}"
        yield f"  ends     once the interval is clear: {bounds}; given up after {GIVE_UP_TOKENS:,} tokens"
