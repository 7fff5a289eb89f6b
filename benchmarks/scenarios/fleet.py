"""python -m benchmarks fleet"""

from __future__ import annotations

import resource
import time
from dataclasses import asdict
from pathlib import Path

import click
import numpy as np
from outrider_controller.cli.drafts.plot import Bar, bars
from outrider_controller.cli.output import json_file_option

from benchmarks.report import finish, show, table
from benchmarks.support.machines import H100, L4, LLAMA_1B, LLAMA_1B_INT8, LLAMA_3B, LLAMA_70B, Machine
from benchmarks.support.mean_field import Day, Draft, Hour, Simulation

# Requests per minute in each hour of 14 May 2024 (UTC), of the service "Conversation". Read off the plot "Number of
# invocations per minute" in analysis/AzureLLMInferenceDataset2024.ipynb of github.com/Azure/AzurePublicDataset
# (CC-BY; Stojkovic et al., DynamoLLM, arXiv 2408.00741): the middle of the curve, to some 2 %.
AZURE_RATES = (
    *(2880, 3000, 3130, 2560, 2540, 2690, 3080, 3480, 3430, 3370, 3150, 3420),
    *(3890, 4120, 4440, 4170, 3880, 3590, 3800, 3560, 3200, 2800, 2480, 2270),
)
# Mean of GeneratedTokens in data/AzureLLMInferenceTrace_conv.csv there.
ANSWER_TOKENS = 211.1
_MAX_S, _MAX_MIB = 60.0, 2048.0
_GPUS = 4
_CONTEXT = 1155
"""Mean of ContextTokens there."""
_MAX_SEQUENCES = 256


@click.command("fleet")
@click.option("--targets", type=click.IntRange(1), default=1000, show_default=True, help="Plain, at the peak.")
@click.option("--tenants", type=click.IntRange(2), default=10_000, show_default=True)
@click.option("--token-ms", type=click.FloatRange(1), default=20.0, show_default=True, help="Promised, on average.")
@click.option("--price-h100", type=click.FloatRange(0), default=2.5, show_default=True, help="An hour.")
@click.option("--price-l4", type=click.FloatRange(0), default=0.6, show_default=True, help="An hour.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also draw the cost of each hour, as SVG."
)
@json_file_option
def fleet(
    targets: int,
    tenants: int,
    token_ms: float,
    price_h100: float,
    price_l4: float,
    plot: Path | None,
    json_file: Path | None,
) -> int:
    """What would a day of a large fleet cost and save?

    Computed: 24 hours of the arrivals that Azure published, on targets with Llama 70B on four H100. Draft workers have
    1B in int8 on an L4, or 1B or 3B on an H100. Tenants differ in size and in how well each draft knows their texts.
    Estimates, plan and sizing are those that ship; load, steps and rounds are a mean field, in which a target steps
    other sequences while one waits for its draft. As many targets run as keep a token within --token-ms, on average
    and for tenants without a draft; the arrivals are so many that plain decoding needs --targets of them at the peak.
    It must take at most 60 s of one core and 2 GiB.
    """
    started_s = time.process_time()
    hours = list(Simulation(a_day(targets, tenants, token_ms / 1e3, price_h100, price_l4)).run())
    took_s = time.process_time() - started_s
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    show(table([_row(number, hour) for number, hour in enumerate(hours)]), _sum(hours, took_s, memory_mib))
    if plot is not None:
        plot.write_text(_plot(hours))
    holds = took_s <= _MAX_S and memory_mib <= _MAX_MIB
    body = {
        "holds": holds,
        "cpu_s": round(took_s, 1),
        "memory_mib": round(memory_mib),
        "hours": list(map(asdict, hours)),
    }
    return finish("fleet", body, json_file)


def a_day(targets: int, tenants: int, token_s: float, price_h100: float, price_l4: float) -> Day:
    """Sizes of tenants fall as 1 / rank; the acceptance of 1B is drawn around 0.6, and 3B is right in a third of what
    1B misses, on average."""
    chance = np.random.default_rng(5)
    small = chance.beta(4.2, 2.8, tenants)
    large = small + (1 - small) * chance.uniform(0.0, 2 / 3, tenants)
    weights = 1 / np.arange(1, tenants + 1)
    target = Machine(LLAMA_70B, H100, _GPUS, _CONTEXT)
    # The most that a target brings in plain steps which take no longer, and so its part of the peak.
    fits = next(n for n in range(1, _MAX_SEQUENCES) if n == _MAX_SEQUENCES - 1 or target.step_s(n + 1, n + 1) > token_s)
    peak = targets * fits / target.step_s(fits, fits)
    return Day(
        target=target,
        token_s=token_s,
        most_sequences=_MAX_SEQUENCES,
        target_price=_GPUS * price_h100,
        drafts=[
            Draft("1B on L4", Machine(LLAMA_1B_INT8, L4, context=_CONTEXT), price_l4, small, batch=8),
            Draft("1B on H100", Machine(LLAMA_1B, H100, context=_CONTEXT), price_h100, small, batch=64),
            Draft("3B on H100", Machine(LLAMA_3B, H100, context=_CONTEXT), price_h100, large, batch=64),
        ],
        weights=chance.permutation(weights / weights.sum()),
        rates=[peak * rate / max(AZURE_RATES) for rate in AZURE_RATES],
    )


def _row(number: int, hour: Hour) -> dict[str, object]:
    return {
        "HOUR": number,
        "TOKENS/S": f"{hour.rate:,.0f}",
        "PLAIN TARGETS": hour.plain_targets,
        "TARGETS": hour.targets,
        **{name.upper(): count for name, count in hour.drafts.items()},
        "DRAFTING": f"{hour.drafting:.0%}",
        "SEQUENCES": f"{hour.sequences:.0f}",
        "MS/STEP": f"{1e3 * hour.step_s:.1f}",
        "MS/TOKEN ON PLAIN TARGETS": f"{1e3 * hour.token_s:.1f}",
        "COST": f"{hour.cost:,.0f}",
        "PLAIN COST": f"{hour.plain_cost:,.0f}",
        "SAVING": f"{hour.saving:.0%}",
    }


def _sum(hours: list[Hour], took_s: float, memory_mib: float) -> str:
    cost, plain = sum(hour.cost for hour in hours), sum(hour.plain_cost for hour in hours)
    tokens = 3600 * sum(hour.rate for hour in hours)
    return (
        f"{tokens / ANSWER_TOKENS / 1e6:,.0f} million answers; {plain:,.0f} plain, {cost:,.0f} with drafts, saving "
        f"{1 - cost / plain:.0%}; a million tokens {1e6 * plain / tokens:.2f} and {1e6 * cost / tokens:.2f}; "
        f"computed in {took_s:.0f} s of one core and {memory_mib:.0f} MiB"
    )


def _plot(hours: list[Hour]) -> str:
    rows = [
        Bar(
            f"{number}:00, {hour.rate / 1e6:.1f} M tokens/s",
            {"plain": hour.plain_cost / 1e3, "with drafts": hour.cost / 1e3},
        )
        for number, hour in enumerate(hours)
    ]
    return bars("A day of a fleet, computed: cost of each hour, in thousands", rows, line=0.0)
