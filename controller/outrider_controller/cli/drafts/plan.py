"""outrider plan: the speed-up from speculation, before it is tried.

Leviathan et al. 2023, section 3.3: if each drafted token is accepted with probability a, K of them give
(1 - a^(K+1)) / (1 - a) tokens per round, including the target's own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from outrider.limits import MAX_DRAFT_TOKENS

from outrider_controller.cli.asking import NumberRange
from outrider_controller.cli.drafts.what_if import what_if, what_if_options
from outrider_controller.cli.drafts.where import found_places, link_options, read_measured, where_table
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import cell, columns, emit, output_option


def tokens_per_round(acceptance: float, num_draft_tokens: int) -> float:
    """Expected tokens of one round. `acceptance`, in [0, 1], is that of a drafted token after only accepted ones."""
    if acceptance == 1:
        return num_draft_tokens + 1.0
    return float((1 - acceptance ** (num_draft_tokens + 1)) / (1 - acceptance))


@dataclass(frozen=True, slots=True)
class ForecastRound:
    """One round, in plain steps of the target."""

    num_draft_tokens: int
    tokens: float
    """Committed."""
    cost_ratio: float
    """Time of a target step over that of a draft's forward."""
    row_share: float = 0.0
    """Time that one more row adds to a step, in steps of one row."""

    @property
    def steps(self) -> float:
        """Duration, in plain steps: K forwards of the draft, then one step of K + 1 rows."""
        return 1 + self.num_draft_tokens * (self.row_share + 1 / self.cost_ratio)

    @property
    def speedup(self) -> float:
        return self.tokens / self.steps

    def answer(self, num_tokens: int) -> tuple[float, float]:
        """Rounds that an answer takes, and their duration in plain steps."""
        rounds = num_tokens / self.tokens
        return rounds, rounds * self.steps


def best_round(acceptance: float, cost_ratio: float, row_share: float, most: int) -> ForecastRound:
    """The K of at most `most` with the greatest speed-up; 0 where none is faster than plain decoding."""
    rounds = [ForecastRound(k, tokens_per_round(acceptance, k), cost_ratio, row_share) for k in range(most + 1)]
    return max(rounds, key=lambda one: one.speedup)


@click.command("plan")
@click.option("--acceptance", type=NumberRange(0, 1), help="Share of drafted tokens that the target accepts.")
@click.option(
    "--tokens-per-round",
    "tokens_per_round_",
    type=NumberRange(1),
    help="Instead of --acceptance, if measured.",
)
@click.option(
    "-k",
    "--num-draft-tokens",
    "num_draft_tokens",
    type=click.IntRange(1, MAX_DRAFT_TOKENS),
    default=4,
    show_default=True,
    help="Draft tokens per round.",
)
@click.option(
    "--cost-ratio",
    type=NumberRange(0, min_open=True),
    help="How many times cheaper a forward of the draft is than a step of the target.",
)
@click.option(
    "--row-share",
    type=NumberRange(0),
    default=0.0,
    show_default=True,
    help="What one more row adds to a step of the target, in steps.",
)
@click.option("--tokens", "num_tokens", type=click.IntRange(1), help="Length of the answer to estimate.")
@click.option("--target-b", type=NumberRange(0, min_open=True), help="The target's parameters, in billions.")
@click.option("--draft-b", type=NumberRange(0, min_open=True), help="The draft's.")
@click.option("--memory-gb", type=NumberRange(0, min_open=True), help="Of the device that both would share.")
@click.option(
    "--measured",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON of `outrider compare drafts`: where its drafts should run.",
)
@link_options
@what_if_options
@output_option("text", "json")
def plan_command(
    acceptance: float | None,
    tokens_per_round_: float | None,
    num_draft_tokens: int,
    cost_ratio: float | None,
    row_share: float,
    num_tokens: int | None,
    target_b: float | None,
    draft_b: float | None,
    memory_gb: float | None,
    measured: Path | None,
    round_trip: float,
    gbit: float,
    slower: float,
    output: str,
    **asked: Any,
) -> int:
    """Estimate what speculation would save, and the memory that it needs.

    Measure acceptance first: `outrider compare drafts`, or the metrics of a running stack.

    With --measured, it prints what `outrider compare drafts` prints of places, for another network or draft workers on
    another device.

    With --what-if, requests that were recorded are served again in virtual time, by the scheduler, the drafting and the
    plan that ship, with other loads, drafts and links. That says tokens per second, the time of a token (half of them,
    and 99 %, come within it), what a million tokens cost, and what drafts save.
    """
    if (file := asked.pop("what_if")) is not None:
        return what_if(file, output, **asked)
    if measured is not None:
        return _places(measured, output, round_trip=round_trip, gbit=gbit, slower=slower)
    if cost_ratio is None:
        raise click.UsageError("--cost-ratio is needed, or --measured or --what-if")
    if (acceptance is None) == (tokens_per_round_ is None):
        raise click.UsageError("give one of --acceptance and --tokens-per-round")
    if tokens_per_round_ is not None and tokens_per_round_ > num_draft_tokens + 1:
        raise click.UsageError(f"--tokens-per-round: {num_draft_tokens} drafted tokens give at most one token more")
    if acceptance is None:
        assert tokens_per_round_ is not None
        tokens = tokens_per_round_
    else:
        tokens = tokens_per_round(acceptance, num_draft_tokens)
    planned = ForecastRound(num_draft_tokens, tokens, cost_ratio, row_share)
    figures: dict[str, object] = {
        "num_draft_tokens": num_draft_tokens,
        "tokens_per_round": round(tokens, 3),
        "steps_per_round": round(planned.steps, 3),
        "speedup": round(planned.speedup, 3),
    }
    if acceptance is not None:
        figures["best_num_draft_tokens"] = best_round(
            acceptance, cost_ratio, row_share, MAX_DRAFT_TOKENS
        ).num_draft_tokens
    if num_tokens is not None:
        rounds, steps = planned.answer(num_tokens)
        figures |= {"tokens": num_tokens, "target_passes": round(rounds, 2), "step_equivalents": round(steps, 1)}
    figures |= _memory(target_b, draft_b, memory_gb)
    table = columns(["FIGURE", "VALUE"], [[name, cell(value)] for name, value in figures.items()])
    emit("plan", figures, output, table)
    return ExitCode.OK


def _places(file: Path, output: str, **link: float) -> int:
    try:
        found = found_places(read_measured(file), **link)
    except ValueError as error:
        raise CommandError(str(error)) from None
    emit("places", {"places": list(map(asdict, found))}, output, where_table(found))
    return ExitCode.OK


def _memory(target_b: float | None, draft_b: float | None, memory_gb: float | None) -> dict[str, object]:
    """Of weights alone, of two bytes each: the KV cache comes on top."""
    given = (("target", target_b), ("draft", draft_b))
    sizes = {name: 2 * billions for name, billions in given if billions is not None}
    figures: dict[str, object] = {f"{name}_weights_gb": round(size, 1) for name, size in sizes.items()}
    if sizes:
        figures["weights_gb"] = round(sum(sizes.values()), 1)
    if sizes and memory_gb is not None:
        figures["fits_on_one_device"] = sum(sizes.values()) <= memory_gb
    return figures
