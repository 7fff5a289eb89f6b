"""python -m benchmarks combined"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click
from outrider_controller.cli.output import json_file_option
from outrider_controller.cli.up.models import DEFAULT_TARGET, default_draft

from benchmarks.report import finish, show, table
from benchmarks.support.progress import Progress

if TYPE_CHECKING:
    from outrider.local import Pair

_LEAST = 10.0
_SYSTEM = "You are a helpful assistant of a shop for garden tools. " * 12
_QUESTIONS = ("rake", "spade", "hoe", "saw", "axe", "fork", "hose", "pump")

Way = Callable[[Sequence[Sequence[int]]], list[list[int]]]
"""Answers all prompts."""


@click.command("combined")
@click.option("--requests", type=click.IntRange(1), default=16, show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=32, show_default=True, help="Of each answer.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Turns of each way.")
@json_file_option
def combined(requests: int, tokens: int, rounds: int, json_file: Path | None) -> int:
    """How much faster are all techniques together than a loop over stock transformers?

    Requests with one system prompt, in one process on one core. Each way adds one technique to the one before it, and
    the ways take turns.
    """
    import torch

    torch.set_num_threads(1)
    prompts, ways = _prompts(requests), _ways(tokens)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    step = Progress("turns", rounds * len(ways))
    for number in range(rounds):
        for name, way in list(ways.items())[:: 1 if number % 2 == 0 else -1]:
            began_s = time.perf_counter()
            way(prompts)
            seconds[name].append(time.perf_counter() - began_s)
            step(sum(map(len, seconds.values())), name)
    found = {name: median(each) for name, each in seconds.items()}
    first, before, rows = next(iter(found.values())), 0.0, []
    for name, each in found.items():
        rows.append({"way": name, "s": round(each, 2), "× before": round(before / each, 2) if before else None})
        before = each
    whole = first / before
    show(table(rows), f"All together: {whole:.1f} × (at least {_LEAST:g} is the aim); medians of {rounds} turns.")
    return finish("combined", {"holds": whole >= _LEAST, "whole": whole, "rows": rows, "s": seconds}, json_file)


def _prompts(count: int) -> list[list[int]]:
    from outrider.engine import resolve
    from outrider.engine.checkpoints.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve(DEFAULT_TARGET))
    chats = (
        [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": f"{number + 1} sentences about a {_QUESTIONS[number % len(_QUESTIONS)]}."},
        ]
        for number in range(count)
    )
    texts = (tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats)
    return [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]


def _ways(tokens: int) -> dict[str, Way]:
    def alone(pair: Pair) -> Way:
        return lambda prompts: [_answers(pair, [prompt], tokens)[0] for prompt in prompts]

    def together(pair: Pair, *, speculate: bool = False) -> Way:
        return lambda prompts: _answers(pair, prompts, tokens, speculate)

    return {
        "a loop over stock transformers": _stock(tokens),
        "our engine": alone(_pair(1, prefix_cache=False)),
        "continuous batching": together(_pair(64, prefix_cache=False)),
        "shared prefix": together(_pair(64, prefix_cache=True)),
        "speculation": together(_pair(64, prefix_cache=True), speculate=True),
    }


def _pair(max_sequences: int, *, prefix_cache: bool) -> Pair:
    from outrider.drafters import load_drafter
    from outrider.engine import EngineConfig, resolve
    from outrider.engine.models.loader import load_engine
    from outrider.local import Pair

    config = EngineConfig(prefix_cache=prefix_cache)
    draft = load_drafter(resolve(default_draft(DEFAULT_TARGET)))
    return Pair(load_engine(resolve(DEFAULT_TARGET), config), draft, max_sequences=max_sequences, ignore_eos=True)


def _answers(pair: Pair, prompts: Sequence[Sequence[int]], tokens: int, speculate: bool = False) -> list[list[int]]:
    return [list(answer.token_ids) for answer in pair.answer(list(prompts), tokens, speculate=speculate)]


def _stock(tokens: int) -> Way:
    import torch
    from outrider.engine import resolve
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve(DEFAULT_TARGET), dtype=torch.float32).eval()

    def way(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        found = []
        for prompt in prompts:
            with torch.inference_mode():
                whole = model.generate(
                    torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
                )
            found.append(whole[0, len(prompt) :].tolist())
        return found

    return way
