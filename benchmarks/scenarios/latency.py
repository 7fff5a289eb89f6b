"""python -m benchmarks latency"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from outrider_controller.cli.client import Answer, Gateway
from outrider_controller.cli.exits import ExitCode
from outrider_controller.cli.figures import Figures
from outrider_controller.cli.hardware import hardware
from outrider_controller.cli.output import columns, json_file_option, note, write_json
from outrider_controller.cli.progress import progress
from outrider_controller.cli.stack import Stack
from outrider_controller.cli.stack_config import StackConfig
from outrider_controller.cli.stack_options import run_async, stack_options

from benchmarks.support.asking import by_category, count_option, make_request, max_tokens_option, mean
from benchmarks.support.prompts import Prompt, prompts_option, read_prompts, spread
from benchmarks.support.stacks import beside


@click.command("latency")
@prompts_option
@count_option(40)
@max_tokens_option(128)
@click.option(
    "--speculation", type=click.Choice(["auto", "on"]), default="auto", show_default=True, help="Against off."
)
@click.option(
    "--prefix-cache/--no-prefix-cache", default=False, show_default=True, help="Cached prompts hide prefill times."
)
@stack_options(pin=True)
@json_file_option
def latency(
    config: StackConfig,
    prompts_file: Path,
    num_prompts: int,
    max_tokens: int,
    speculation: str,
    prefix_cache: bool,
    json_file: Path | None,
) -> int:
    """How much faster is one stream with speculation than without?

    Greedy, one stream, through one stack: each prompt is answered both ways, one right after the other, and which comes
    first alternates. Ratios of tokens/s: of whole requests, prefill included, and from the first token to the last.
    """
    prompts = spread(read_prompts(prompts_file), num_prompts)
    config = replace(config, prefix_cache=prefix_cache)
    return run_async(_latency(config, prompts, speculation, max_tokens, json_file))


async def _latency(
    config: StackConfig, prompts: list[Prompt], speculation: str, max_tokens: int, json_file: Path | None
) -> int:
    found: dict[str, list[Answer]] = {"off": [], speculation: []}
    async with Stack(config, note) as stack, Gateway(stack.gateway_grpc) as gateway:
        with beside(stack), progress("prompts", len(prompts)) as report:
            for mode in (speculation, "off"):
                await gateway.answer(make_request(config.model, prompts[0].text, mode, max_tokens=16))
            for number, prompt in enumerate(prompts):
                for mode in (speculation, "off") if number % 2 else ("off", speculation):
                    request = make_request(config.model, prompt.text, mode, max_tokens=max_tokens, temperature=0.0)
                    found[mode].append(await gateway.answer(request))
                report(number + 1, "")
    result = _report(prompts, found["off"], found[speculation])
    click.echo(_table(result))
    more = {"speculation": speculation, "max_tokens": max_tokens, "prefix_cache": config.prefix_cache}
    write_json(json_file, "bench-latency", {**result, **more, "hardware": hardware()})
    return ExitCode.OK


def _report(prompts: list[Prompt], plain: list[Answer], speculative: list[Answer]) -> dict[str, Any]:
    off, on = by_category(prompts, plain), by_category(prompts, speculative)
    categories = {category: _compared(off[category], on[category]) for category in off}
    names = ("request_speedup", "decode_speedup")
    return {
        "num_prompts": len(prompts),
        "texts_equal": sum(a.text == b.text for a, b in zip(plain, speculative, strict=True)),
        "all": _compared(plain, speculative),
        "mean_over_categories": {name: round(mean([c[name] for c in categories.values()]), 4) for name in names},
        "categories": categories,
    }


def _compared(plain: list[Answer], speculative: list[Answer]) -> dict[str, Any]:
    off, on = Figures.of(plain), Figures.of(speculative)
    return {
        "request_speedup": round(on.tokens_per_second / off.tokens_per_second, 4),
        "decode_speedup": round(on.decode_tokens_per_second / off.decode_tokens_per_second, 4),
        "plain": off.summary(),
        "speculation": on.summary(),
    }


def _table(result: dict[str, Any]) -> str:
    header = ["CATEGORY", "PLAIN TOKENS/S", "SPECULATION", "×", "DECODE ×", "ACCEPTANCE", "TOKENS/ROUND"]
    header += ["ROUND MS", "DRAFT", "WIRE", "VERIFY"]
    rows = [_row(name, compared) for name, compared in result["categories"].items()]
    means = result["mean_over_categories"]
    mean_cells = [f"{means['request_speedup']:.2f}", f"{means['decode_speedup']:.2f}"]
    rows.append(["mean", "-", "-", *mean_cells, *["-"] * (len(header) - 5)])
    rows.append(_row("all", result["all"]))
    equal = f"{result['texts_equal']} of {result['num_prompts']} texts equal."
    return f"{columns(header, rows)}\n\n{equal}"


def _row(name: str, compared: dict[str, Any]) -> list[str]:
    off, on = compared["plain"], compared["speculation"]
    return [
        name,
        f"{off['tokens_per_second']:.1f}",
        f"{on['tokens_per_second']:.1f}",
        f"{compared['request_speedup']:.2f}",
        f"{compared['decode_speedup']:.2f}",
        f"{on['acceptance']:.2f}",
        f"{on['tokens_per_round']:.2f}",
        *(f"{on[part]:.1f}" for part in ("round_ms", "draft_ms", "wire_ms", "verify_ms")),
    ]
