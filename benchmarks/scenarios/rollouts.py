"""python -m benchmarks rollouts"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from outrider.rpc.v1 import control_pb2, drafts_pb2
from outrider_controller.cli.clusters.control import call_control
from outrider_controller.cli.drafts.versions import rollout_row
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.ports import Ports
from outrider_controller.cli.up.process import ProcessSpec
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig, StackPlan
from outrider_controller.cli.up.stack_options import run_async

from benchmarks.report import finish, show, table
from benchmarks.support.asking import answers, max_tokens_option
from benchmarks.support.prompts import Prompt, prompts_option, read_prompts
from benchmarks.support.stacks import changed_draft, with_options

_BARS = {"worse": ("undone", 20_000), "better": ("promoted", 100_000)}
_REQUESTS = 64
_SHOWN = ("candidate", "state", "candidate_tokens", "incumbent_tokens", "saving")


@click.command("rollouts")
@prompts_option
@max_tokens_option(64)
@click.option(
    "--candidate", "which", type=click.Choice([*_BARS]), multiple=True, help="May be repeated; default: both."
)
@click.option("--share", type=click.FloatRange(0), default=0.03, show_default=True)
@click.option("--streams", type=click.IntRange(1), default=8, show_default=True)
@click.option("--most", type=click.IntRange(1), default=500_000, show_default=True, help="Tokens, of all requests.")
@json_file_option
def rollouts(
    prompts_file: Path,
    max_tokens: int,
    which: Sequence[str],
    share: float,
    streams: int,
    most: int,
    json_file: Path | None,
) -> int:
    """After how many tokens is a draft that is worse by 0.05 in acceptance undone, and one that is better promoted?

    The shipped draft, and the same with one token in ten replaced by another: that lowers its acceptance by 0.05. One
    of the two drafts for everybody, the other is the candidate.
    """
    asking = read_prompts(prompts_file), max_tokens, streams, most
    start = control_pb2.StartRolloutRequest(draft="new", share=share)
    found = [run_async(_rolled_out(candidate, start, *asking)) for candidate in which or _BARS]
    show(table([{name.upper(): row[name] for name in _SHOWN} for row in found]))
    bars = [(row, *_BARS[row["candidate"]]) for row in found]
    holds = all(row["state"] == state and row["candidate_tokens"] <= tokens for row, state, tokens in bars)
    return finish("rollouts", {"holds": holds, "rollouts": found, "max_tokens": max_tokens}, json_file)


async def _rolled_out(
    candidate: str,
    start: control_pb2.StartRolloutRequest,
    prompts: Sequence[Prompt],
    max_tokens: int,
    streams: int,
    most: int,
) -> dict[str, Any]:
    def amend(plan: StackPlan, ports: Ports) -> StackPlan:
        old, new = plan.drafts
        new = replace(new, argv=(*with_options(new.argv, model_name="new"), "--candidate"))
        return replace(plan, drafts=(old, _erring(new)) if candidate == "worse" else (_erring(old), new))

    async with Stack(StackConfig(drafts=2), note, amend) as stack:
        await _started(stack, start)
        asked = 0
        while True:
            batch = [prompts[(asked + n) % len(prompts)] for n in range(_REQUESTS)]
            asked += _REQUESTS
            await answers(
                *(stack.gateway_grpc, stack.config.model, batch, f"{candidate}, request {asked}"),
                speculation="on",
                concurrency=streams,
                temperature=0.0,
                max_tokens=max_tokens,
            )
            row = rollout_row((await _draft(stack)).rollout)
            note(f"{row}")
            if row["state"] != "running" or row["candidate_tokens"] + row["incumbent_tokens"] > most:
                return {"candidate": candidate, **row}


def _erring(draft: ProcessSpec) -> ProcessSpec:
    given = dict(pairwise(draft.argv))
    return changed_draft(draft, given["--model-name"], given["--model"], "errs")


async def _started(stack: Stack, request: control_pb2.StartRolloutRequest) -> None:
    """Once the candidate is listed."""
    while not any(one.name == "new" and one.num_workers for one in await _listed(stack)):  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    await call_control(stack.control, lambda stub: stub.StartRollout(request))


async def _listed(stack: Stack) -> Sequence[drafts_pb2.DraftVersion]:
    return (await call_control(stack.control, lambda stub: stub.ListDrafts(control_pb2.ListDraftsRequest()))).drafts


async def _draft(stack: Stack) -> drafts_pb2.DraftVersion:
    return next(one for one in await _listed(stack) if one.name == "new")
