"""outrider get sequences"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from outrider.rpc.v1 import control_pb2, trace_pb2

from outrider_controller.cli.clusters.control import ask_control
from outrider_controller.cli.output import acceptance, moment, named, note
from outrider_controller.cli.watching import limit_option, list_options, show_rows

COLUMNS = ("id", "tenant", "output_tokens", "draft_tokens", "acceptance", "seconds")
MOST = 10_000
"""Of one answer."""
_WIDE = (*COLUMNS, "model", "target", "draft", "prompt_tokens", "router", "started")


@click.command("sequences")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--tenant", default="", metavar="NAME", help="Only this one's.")
@click.option("--worker", default="", metavar="ID", help="Only those on this target or draft.")
@limit_option(MOST)
@list_options
def get_sequences(
    ids: tuple[str, ...], tenant: str, worker: str, limit: int, watch: bool, control: str, output: str
) -> None:
    """List requests under way, the oldest first, and how their drafts fare; with -o wide where each is open.

    DRAFT-TOKENS: most drafted tokens a step now; 0: it decodes plainly. `outrider trace ID` shows every round of one.
    With IDs only those; exit code 3 if one of them is not under way.
    """
    most = MOST if ids else limit
    request = control_pb2.ListSequencesRequest(limit=most, tenant=tenant, worker_id=worker)

    def read() -> list[dict[str, Any]]:
        answer = ask_control(control, lambda stub: stub.ListSequences(request))
        if answer.num_sequences > len(answer.sequences):
            note(f"{len(answer.sequences)} of {answer.num_sequences} sequences (--limit)")
        note_unreachable(answer.unreachable_routers)
        return named(ids, "sequence", [sequence_row(sequence) for sequence in answer.sequences])

    show_rows("sequences", read, _WIDE if output == "wide" else COLUMNS, output, watch=watch)


def note_unreachable(routers: Sequence[str]) -> None:
    if routers:
        note(f"without what {', '.join(routers)} knows: no answer")


def sequence_row(sequence: trace_pb2.RunningSequence) -> dict[str, Any]:
    return {
        "id": sequence.request_id,
        "tenant": sequence.tenant,
        "model": sequence.model,
        "target": sequence.target_id,
        "draft": sequence.draft_id,
        "router": sequence.router_id,
        "started": moment(sequence.started_unix_us / 1e6),
        "seconds": round(sequence.duration_us / 1e6, 1),
        "prompt_tokens": sequence.prompt_tokens,
        "output_tokens": sequence.output_tokens,
        "draft_tokens": sequence.max_draft_tokens,
        "acceptance": acceptance(sequence.num_verified_tokens, sequence.num_accepted_draft_tokens),
    }
