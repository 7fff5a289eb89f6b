"""python -m benchmarks rounds"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from outrider_controller.cli.client import Gateway
from outrider_controller.cli.exits import ExitCode
from outrider_controller.cli.hardware import hardware
from outrider_controller.cli.models import default_draft
from outrider_controller.cli.output import columns, json_file_option, note, write_json
from outrider_controller.cli.progress import progress
from outrider_controller.cli.stack import Stack, unamended
from outrider_controller.cli.stack_config import StackConfig
from outrider_controller.cli.stack_options import run_async
from outrider_controller.router.config import PolicyConfig

from benchmarks.support.asking import count_option, make_request, max_tokens_option
from benchmarks.support.prompts import prompts_option, read_prompts, spread
from benchmarks.support.stacks import added_round_trip, beside, delayed, replace_drafts, target_cores

if TYPE_CHECKING:
    from outrider.local import Pair

_MOST_OVER_ONE_PROCESS = 1.05
_LEAST_OVER_IN_STEP = 1.15
# What a draft runs ahead to depends on when it hears what: once is not enough for all that it may be asked.
_REHEARSALS = 3
_ARMS = {
    "apart": "apart, ahead",
    "in step": "apart, in step",
    "one": "one process, one core",
}


@dataclass(frozen=True, slots=True)
class Decoded:
    """One answer from its first tokens on."""

    token_ids: tuple[int, ...]
    rounds: int
    """After the first, in which the prompt is read."""
    seconds: float


@click.command("rounds")
@prompts_option
@count_option(18)
@max_tokens_option(64)
@click.option(
    "--added-ms",
    type=click.FloatRange(0, 1000),
    default=0.0,
    show_default=True,
    metavar="MS",
    help="Round trip between router and workers, on top of this machine's.",
)
@click.option(
    "--recalled",
    is_flag=True,
    help="Drafts apart compute each thing once, before, and recall it in the time that takes alone: as on a machine"
    " of its own, what a draft reads does not slow the target.",
)
@json_file_option
def rounds(
    prompts_file: Path, num_prompts: int, max_tokens: int, added_ms: float, recalled: bool, json_file: Path | None
) -> int:
    """What does a round take apart, in step, and in one process?

    Greedy, one stream, the shipped draft, every prompt three ways, one right after the other. Apart, ahead: as we ship
    it, the draft running ahead of its guess and, where its answers take long, preparing for other outcomes. In step:
    the same processes, but the draft begins when it hears of a commit and the target waits for it.
    One process: the workers' own drafting and verification in turns on one core, without a network. The first may take
    1.05 times as long as the last for a round, and must be 1.15 times as fast as the second. From the first token on.
    """
    prompts = [prompt.text for prompt in spread(read_prompts(prompts_file), num_prompts)]
    return run_async(_rounds(prompts, max_tokens, added_ms, recalled, json_file))


async def _rounds(prompts: list[str], max_tokens: int, added_ms: float, recalled: bool, json_file: Path | None) -> int:
    config = StackConfig(pin=True, realtime=True, prefix_cache=False)
    async with AsyncExitStack() as exits:
        enter = exits.enter_async_context
        in_step = replace(config, run_ahead_tokens=0, num_alternatives=0)
        stacks = [await enter(Stack(c, note, delayed if added_ms else unamended)) for c in (config, in_step)]
        for stack in stacks if added_ms else ():
            await added_round_trip(stack, added_ms)
        for stack in stacks if recalled else ():
            await replace_drafts(stack, config.draft_kind, config.draft, "recalls")
        gateways = [await enter(Gateway(stack.gateway_grpc)) for stack in stacks]
        # Spawned: a fork would take over gRPC's threads half alive.
        pool = exits.enter_context(
            ProcessPoolExecutor(
                1,
                multiprocessing.get_context("spawn"),
                initializer=_load,
                initargs=(stacks[0].target_path, target_cores(stacks[0])),
            )
        )
        exits.enter_context(beside(stacks[0]))
        found: dict[str, list[Decoded]] = {arm: [] for arm in _ARMS}

        async def ask(arm: str, prompt: str, most: int) -> Decoded:
            if arm == "one":
                return await asyncio.get_running_loop().run_in_executor(pool, _answer, prompt, most)
            return await _streamed(gateways[arm == "in step"], config.model, prompt, most)

        with progress("prompts", len(prompts)) as report:
            for arm in _ARMS:
                await ask(arm, prompts[0], 16)
            for number, prompt in enumerate(prompts):
                for arm in ("apart", "in step") * (_REHEARSALS if recalled else 0):
                    await ask(arm, prompt, max_tokens)
                for arm in list(_ARMS) if number % 2 else reversed(_ARMS):
                    found[arm].append(await ask(arm, prompt, max_tokens))
                report(number + 1, "")
    result = summary(found)
    click.echo(_table(result))
    body = {**result, "added_ms": added_ms, "recalled": recalled, "max_tokens": max_tokens, "hardware": hardware()}
    write_json(json_file, "bench-rounds", body)
    return ExitCode.OK if result["holds"] else ExitCode.ERROR


async def _streamed(gateway: Gateway, model: str, prompt: str, max_tokens: int) -> Decoded:
    request = make_request(model, prompt, "on", max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    answer = await gateway.answer(request)
    return Decoded(tuple(answer.token_ids), answer.sums.num_steps - 1, answer.decode_s)


_here: list[tuple[Pair, Any]] = []
"""A spawned process's pair and tokenizer."""


def _load(target: Path, cores: Sequence[int]) -> None:
    os.sched_setaffinity(0, cores)
    import torch
    from outrider.drafters import DrafterKind, load_drafter
    from outrider.engine import Engine, EngineConfig, resolve
    from outrider.local import Pair
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    config = StackConfig()
    engine = EngineConfig(prefix_cache=False)
    draft = resolve(default_draft(config.target_model, config.draft_kind))
    drafter = load_drafter(DrafterKind(config.draft_kind), draft, engine=engine)
    most = PolicyConfig().max_draft_tokens
    pair = Pair(Engine.load(target, engine), drafter, max_sequences=1, max_draft_tokens=most, ignore_eos=True)
    _here.append((pair, AutoTokenizer.from_pretrained(target)))


def _answer(prompt: str, max_tokens: int) -> Decoded:
    pair, tokenizer = _here[0]
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    [answer] = pair.answer([tokenizer.encode(text, add_special_tokens=False)], max_tokens, speculate=True)
    return Decoded(tuple(answer.token_ids), answer.num_steps - 1, answer.last_s - answer.first_s)


def summary(found: dict[str, list[Decoded]]) -> dict[str, Any]:
    """Sums over the prompts, and whether the bounds hold."""
    arms = {arm: _arm(decoded) for arm, decoded in found.items()}
    texts = [[d.token_ids for d in decoded] for decoded in found.values()]
    over_one = arms["apart"]["round_ms"] / arms["one"]["round_ms"]
    in_step_over_one = arms["in step"]["round_ms"] / arms["one"]["round_ms"]
    over_step = arms["apart"]["tokens_per_second"] / arms["in step"]["tokens_per_second"]
    return {
        "holds": over_one <= _MOST_OVER_ONE_PROCESS and over_step >= _LEAST_OVER_IN_STEP,
        "round_over_one_process": round(over_one, 4),
        "in_step_over_one_process": round(in_step_over_one, 4),
        "speed_over_in_step": round(over_step, 4),
        "texts_equal": sum(len(set(three)) == 1 for three in zip(*texts, strict=True)),
        "num_prompts": len(texts[0]),
        "arms": arms,
    }


def _arm(decoded: Sequence[Decoded]) -> dict[str, float]:
    seconds, rounds = sum(d.seconds for d in decoded), sum(d.rounds for d in decoded)
    tokens = sum(len(d.token_ids) - 1 for d in decoded)
    return {
        "tokens_per_second": round(tokens / seconds, 2),
        "tokens_per_round": round(tokens / rounds, 3),
        "round_ms": round(seconds / rounds * 1e3, 3),
    }


def _table(result: dict[str, Any]) -> str:
    rows = [
        [name, f"{arm['tokens_per_second']:.1f}", f"{arm['tokens_per_round']:.2f}", f"{arm['round_ms']:.2f}"]
        for name, arm in ((_ARMS[key], arm) for key, arm in result["arms"].items())
    ]
    table = columns(["ROUNDS", "TOKENS/S", "TOKENS/ROUND", "MS A ROUND"], rows)
    return (
        f"{table}\n\n"
        f"A round apart / in one process: {result['round_over_one_process']:.2f} (at most {_MOST_OVER_ONE_PROCESS}), "
        f"in step {result['in_step_over_one_process']:.2f}\n"
        f"Ahead / in step: {result['speed_over_in_step']:.2f} (at least {_LEAST_OVER_IN_STEP})\n"
        f"{result['texts_equal']} of {result['num_prompts']} texts equal in all three."
    )
