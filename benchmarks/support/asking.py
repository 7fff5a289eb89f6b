"""Sends prompts through the gateway, a few at a time, and returns the answers in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import click
from outrider.rpc.access.roles import bearer
from outrider.rpc.v1 import generation_pb2 as generation
from outrider_controller.cli.client import SPECULATION_MODES, Gateway, GatewayAnswer, apply_prompt

from benchmarks.support.progress import Progress
from benchmarks.support.prompts import Prompt

_TIMEOUT_S = 300.0

T = TypeVar("T")
Numbered = Callable[[int], int]


def count_option(default: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "-n", "--num-prompts", type=click.IntRange(1), default=default, show_default=True, help="Spread by category."
    )


def max_tokens_option(default: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "--max-tokens", type=click.IntRange(2), default=default, show_default=True, metavar="N", help="Of each answer."
    )


def make_request(model: str, prompt: str, speculation: str, **options: Any) -> generation.GenerateRequest:
    """A chat with one turn, with metrics."""
    request = generation.GenerateRequest(model=model)
    apply_prompt(request, prompt)
    request.options.MergeFrom(generation.GenerationOptions(include_metrics=True, **options))
    request.options.speculation = SPECULATION_MODES[speculation]
    return request


class Keyed(Gateway):
    """A gateway client with its own API key; an empty one means the context's key, if there is any."""

    def __init__(self, address: str, key: str) -> None:
        super().__init__(address)
        self._credential = bearer(key) if key else self._credential


async def answers(
    address: str,
    model: str,
    prompts: Sequence[Prompt],
    label: str,
    *,
    speculation: str,
    concurrency: int = 1,
    seed: Numbered | None = None,
    keys: Sequence[str] = (),
    **options: Any,
) -> list[GatewayAnswer]:
    """One answer per prompt, in their order. `seed`: makes a seed from the prompt's number; `keys`: API keys, one for
    each prompt. Raises CommandError.
    """
    done = 0
    room = asyncio.Semaphore(concurrency)
    report = Progress(label, len(prompts))
    keys = keys or [""] * len(prompts)
    async with AsyncExitStack() as stack:
        gateways = {key: await stack.enter_async_context(Keyed(address, key)) for key in dict.fromkeys(keys)}

        async def ask(number: int, prompt: Prompt) -> GatewayAnswer:
            nonlocal done
            more = {"seed": seed(number)} if seed else {}
            request = make_request(model, prompt.text, speculation, **options, **more)
            async with room:
                answer = await gateways[keys[number]].answer(request, _TIMEOUT_S)
            done += 1
            report(done, "")
            return answer

        return list(await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(prompts))))


def by_category(prompts: Sequence[Prompt], answered: Sequence[T]) -> dict[str, list[T]]:
    """Answers by category, in alphabetical order."""
    found: dict[str, list[T]] = {category: [] for category in sorted({prompt.category for prompt in prompts})}
    for prompt, answer in zip(prompts, answered, strict=True):
        found[prompt.category].append(answer)
    return found


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
