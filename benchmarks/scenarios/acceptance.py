"""python -m benchmarks acceptance"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from outrider_controller.cli.ask.figures import AnswerFigures
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.ports import Ports
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig, StackPlan
from outrider_controller.cli.up.stack_options import run_async

from benchmarks.report import Row, finish, show, table
from benchmarks.support.asking import answers, by_category, count_option, max_tokens_option, mean
from benchmarks.support.prompts import Prompt, prompts_option, read_prompts, spread

Measured = dict[str, dict[str, AnswerFigures]]
"""Kind of drafts → category → figures."""
_WORKERS = {"draft worker": 1, "lookups": 0}
"""Kind of drafts → draft workers. Targets look up beside a draft worker too."""


@click.command("acceptance")
@prompts_option
@count_option(60)
@max_tokens_option(64)
@click.option("--draft-model", default="", metavar="PATH|NAME", help="Default: the one shipped.")
@click.option("--max-draft-tokens", type=click.IntRange(1), default=None, metavar="N", help="Default: the policy's.")
@json_file_option
def acceptance(
    prompts_file: Path,
    num_prompts: int,
    max_tokens: int,
    draft_model: str,
    max_draft_tokens: int | None,
    json_file: Path | None,
) -> int:
    """How much of what is drafted is accepted, with a draft worker and by lookups alone?

    Greedy, one stream. Acceptance is accepted / verified; what comes after a rejected token is not verified.
    """
    prompts = spread(read_prompts(prompts_file), num_prompts)
    config = StackConfig(draft_model=draft_model, pin=True)
    options = {"temperature": 0.0, "max_tokens": max_tokens}
    if max_draft_tokens:
        options["max_draft_tokens"] = max_draft_tokens
    return run_async(_acceptance(config, prompts, options, json_file))


async def _acceptance(
    config: StackConfig, prompts: list[Prompt], options: dict[str, Any], json_file: Path | None
) -> int:
    measured: Measured = {}

    def amend(plan: StackPlan, ports: Ports) -> StackPlan:
        """Raises the router's limit: a client cannot ask for more than its router allows."""
        most = ("--max-draft-tokens", str(options["max_draft_tokens"])) if "max_draft_tokens" in options else ()
        return replace(plan, controller=replace(plan.controller, argv=(*plan.controller.argv, *most)))

    for kind, drafts in _WORKERS.items():
        async with Stack(replace(config, drafts=drafts), note, amend) as stack:
            answered = await answers(stack.gateway_grpc, stack.config.model, prompts, kind, speculation="on", **options)
            measured[kind] = {c: AnswerFigures.of(found) for c, found in by_category(prompts, answered).items()}
    show(table(list(_rows(measured))))
    return finish("acceptance", {"kinds": _kinds(measured), "num_prompts": len(prompts), "options": options}, json_file)


def _rows(measured: Measured) -> Iterator[Row]:
    """One row per category, then their mean."""
    for category in next(iter(measured.values())):
        yield _row(category, {kind: figures[category].summary() for kind, figures in measured.items()})
    yield _row("mean", {kind: _means(figures) for kind, figures in measured.items()})


def _row(name: str, figures: Mapping[str, Mapping[str, float]]) -> Row:
    row = {"CATEGORY": name}
    for kind, found in figures.items():
        row |= {
            kind.upper(): f"{found['acceptance']:.3f}",
            f"{kind.upper()} TOKENS/ROUND": f"{found['tokens_per_round']:.2f}",
        }
    return row


def _means(figures: dict[str, AnswerFigures]) -> dict[str, float]:
    """Means over the categories, with equal weights."""
    return {
        "acceptance": round(mean([f.acceptance for f in figures.values()]), 4),
        "tokens_per_round": round(mean([f.tokens_per_round for f in figures.values()]), 4),
    }


def _kinds(measured: Measured) -> dict[str, Any]:
    return {
        kind: {"mean": _means(figures), "categories": {c: f.summary() for c, f in figures.items()}}
        for kind, figures in measured.items()
    }
