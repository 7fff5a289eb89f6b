"""python -m benchmarks exactness"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from outrider.engine_config import NATIVE_VARIANTS
from outrider_controller.cli.ask.figures import AnswerFigures
from outrider_controller.cli.client import GatewayAnswer
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig
from outrider_controller.cli.up.stack_options import run_async

from benchmarks.report import Row, finish, show, table
from benchmarks.support.asking import answers, count_option, max_tokens_option
from benchmarks.support.prompts import Prompt, prompts_option, read_prompts, spread
from benchmarks.support.stacks import replace_drafts

_COUPLED = {"temperature": 0.8, "top_p": 0.95, "seed": lambda number: 1000 + number}
_GREEDY = {"temperature": 0.0}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way of answering, compared with plain decoding."""

    mode: str
    dtype: str
    against: str
    num_prompts: int
    different: list[int]
    """Numbers of prompts."""
    acceptance: float

    @property
    def equal(self) -> int:
        return self.num_prompts - len(self.different)


@click.command("exactness")
@prompts_option
@count_option(40)
@max_tokens_option(64)
@click.option("--concurrency", type=click.IntRange(1), default=4, show_default=True, help="Streams at once, float32.")
@click.option("--native-variant", type=click.Choice(NATIVE_VARIANTS), default="auto", help="Of CPU kernels.")
@json_file_option
def exactness(
    prompts_file: Path,
    num_prompts: int,
    max_tokens: int,
    concurrency: int,
    native_variant: str,
    json_file: Path | None,
) -> int:
    """Speculation on, off and with another draft: are the texts equal?

    In float32 greedy, and sampled with a seed (temperature 0.8, top-p 0.95); in bfloat16 greedy.
    """
    prompts = spread(read_prompts(prompts_file), num_prompts)
    kernels = "" if native_variant == "auto" else f"--native-variant {native_variant} --execution native"
    config = StackConfig(pin=True, target_args=kernels, draft_args=kernels)
    return run_async(_exactness(config, prompts, max_tokens, concurrency, json_file))


async def _exactness(
    config: StackConfig, prompts: list[Prompt], max_tokens: int, concurrency: int, json_file: Path | None
) -> int:
    # A float32 target does not run our native kernels; the drafts do.
    found = await _float32(replace(config, target_args="--dtype float32"), prompts, max_tokens, concurrency)
    async with Stack(config, note) as stack:
        plain = await _ask(stack, prompts, "bfloat16, greedy, off", "off", max_tokens, 1, _GREEDY)
        speculative = await _ask(stack, prompts, "bfloat16, greedy, on", "on", max_tokens, 1, _GREEDY)
    found.append(compare("greedy", "bfloat16", "on", plain, speculative))
    show(table([_row(comparison) for comparison in found]))
    return finish("exactness", _report(config, prompts, found, max_tokens), json_file)


async def _float32(config: StackConfig, prompts: list[Prompt], max_tokens: int, concurrency: int) -> list[Comparison]:
    async with Stack(config, note) as stack:

        async def ask(label: str, speculation: str, options: dict[str, Any]) -> list[GatewayAnswer]:
            return await _ask(stack, prompts, f"float32, {label}", speculation, max_tokens, concurrency, options)

        greedy, greedy_on = await ask("greedy, off", "off", _GREEDY), await ask("greedy, on", "on", _GREEDY)
        coupled, coupled_on = await ask("coupled, off", "off", _COUPLED), await ask("coupled, on", "on", _COUPLED)
        await replace_drafts(stack, stack.config.target_model)
        greedy_other = await ask("greedy, other draft", "on", _GREEDY)
        coupled_other = await ask("coupled, other draft", "on", _COUPLED)
    return [
        compare("greedy", "float32", "on", greedy, greedy_on),
        compare("greedy", "float32", "other draft (the target)", greedy, greedy_other),
        compare("coupled", "float32", "on", coupled, coupled_on),
        compare("coupled", "float32", "other draft (the target)", coupled, coupled_other),
    ]


async def _ask(
    stack: Stack,
    prompts: list[Prompt],
    label: str,
    speculation: str,
    max_tokens: int,
    concurrency: int,
    options: dict[str, Any],
) -> list[GatewayAnswer]:
    return await answers(
        stack.gateway_grpc,
        stack.config.model,
        prompts,
        label,
        speculation=speculation,
        concurrency=concurrency,
        max_tokens=max_tokens,
        **options,
    )


def compare(
    mode: str, dtype: str, against: str, plain: Sequence[GatewayAnswer], other: Sequence[GatewayAnswer]
) -> Comparison:
    """Compares texts and token ids by prompt."""
    different = [
        number
        for number, (a, b) in enumerate(zip(plain, other, strict=True))
        if a.text != b.text or a.token_ids != b.token_ids
    ]
    acceptance = AnswerFigures.of(other).acceptance
    return Comparison(mode, dtype, against, len(plain), different, acceptance)


def _row(comparison: Comparison) -> Row:
    return {
        "MODE": comparison.mode,
        "DTYPE": comparison.dtype,
        "AGAINST OFF": comparison.against,
        "EQUAL TEXTS": f"{comparison.equal} of {comparison.num_prompts}",
        "ACCEPTANCE": f"{comparison.acceptance:.2f}",
        "": "DIFFERENT" if comparison.different else "equal",
    }


def _report(config: StackConfig, prompts: list[Prompt], found: list[Comparison], max_tokens: int) -> dict[str, Any]:
    return {
        "kernels": config.draft_args,
        "holds": not any(comparison.different for comparison in found),
        "num_prompts": len(prompts),
        "max_tokens": max_tokens,
        "comparisons": [
            {
                "mode": c.mode,
                "dtype": c.dtype,
                "against": c.against,
                "equal": c.equal,
                "of": c.num_prompts,
                "acceptance": round(c.acceptance, 4),
                "different": [prompts[number].id for number in c.different],
            }
            for c in found
        ],
    }
