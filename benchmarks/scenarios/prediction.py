"""python -m benchmarks prediction"""

from __future__ import annotations

import random
from pathlib import Path

import click
from outrider_controller.cli.ask.client import Gateway
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig
from outrider_controller.cli.up.stack_options import run_async

from benchmarks.arms import Ask, Sample, compared, summary, take_turns
from benchmarks.report import finish, show, table
from benchmarks.support.asking import count_option, make_request, max_tokens_option
from benchmarks.support.prompts import Prompt, prompts_option, read_prompts, spread
from benchmarks.support.stacks import outside_cores

_MIN_SPEEDUP = 2.0
_ARMS = ("off", "auto", "prediction")


@click.command("prediction")
@prompts_option
@count_option(20)
@max_tokens_option(128)
@click.option("--edited", type=click.FloatRange(0, 1), default=0.05, show_default=True, help="Share of words.")
@json_file_option
def prediction(prompts_file: Path, num_prompts: int, max_tokens: int, edited: float, json_file: Path | None) -> int:
    """How much faster is an answer that the client knows but for some words?

    Greedy, one stream. The prediction is the answer itself, with a share of its words replaced by others.
    """
    prompts = spread(read_prompts(prompts_file), num_prompts)
    return run_async(_prediction(prompts, max_tokens, edited, json_file))


async def _prediction(prompts: list[Prompt], max_tokens: int, edited: float, json_file: Path | None) -> int:
    async with Stack(StackConfig(pin=True), note) as stack, Gateway(stack.gateway_grpc) as gateway:
        model = stack.config.model
        predicted: dict[str, str] = {}
        for prompt in prompts:
            answer = await gateway.answer(make_request(model, prompt.text, "off", max_tokens=max_tokens, temperature=0))
            predicted[prompt.text] = with_edits(answer.text, edited, seed=prompt.id)
        arms = {arm: _through(gateway, model, arm, predicted) for arm in _ARMS}
        with outside_cores(stack):
            samples = await take_turns([prompt.text for prompt in prompts], arms, max_tokens, "prompts")
    ratios = {arm: compared(samples["off"], samples[arm]) for arm in _ARMS[1:]}
    speedup, equal = ratios["prediction"]["request_speedup"], ratios["prediction"]["texts_equal"]
    found = {arm: summary(samples[arm]) for arm in _ARMS}
    rows = [{"ARM": arm, "TOKENS/S": f"{found[arm]['tokens_per_second']:.1f}"} for arm in _ARMS]
    last = f"prediction / off: {speedup:.2f} (at least {_MIN_SPEEDUP}); texts equal: {equal} of {len(prompts)}"
    show(table(rows), last)
    holds = speedup >= _MIN_SPEEDUP and equal == len(prompts)
    body = {"holds": holds, "edited": edited, "arms": found, "compared": ratios, "max_tokens": max_tokens}
    return finish("prediction", body, json_file)


def _through(gateway: Gateway, model: str, arm: str, predicted: dict[str, str]) -> Ask:
    async def ask(prompt: str, max_tokens: int) -> Sample:
        text = predicted[prompt] if arm == "prediction" else ""
        mode = "off" if arm == "off" else "auto"
        request = make_request(model, prompt, mode, max_tokens=max_tokens, temperature=0, prediction=text)
        return Sample.of(await gateway.answer(request))

    return ask


def with_edits(text: str, share: float, seed: str) -> str:
    """The text with a share of its words replaced, at least one if it has any."""
    rng, words = random.Random(seed), text.split(" ")
    for at in rng.sample(range(len(words)), max(1, round(share * len(words)))):
        words[at] = "edited"
    return " ".join(words)
