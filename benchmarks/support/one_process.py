"""The ideal for a stack: drafting and verification in one process, in turns on one core, without a network."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider_controller.cli.ask.figures import AnswerFigures
from outrider_controller.cli.up.stack_config import StackConfig
from outrider_controller.router.config import PolicyConfig

from benchmarks.arms import Ask, Sample

if TYPE_CHECKING:
    from outrider.sim.pair import Pair


@contextmanager
def one_process(target: Path, config: StackConfig, cores: Sequence[int], ignore_eos: bool) -> Iterator[Ask]:
    """Uses a child process pinned to `cores`, which loads the models at the first request."""
    # Spawned: gRPC's threads do not survive a fork.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=_load, initargs=(target, config, cores, ignore_eos)) as pool:

        async def ask(prompt: str, max_tokens: int) -> Sample:
            return await asyncio.get_running_loop().run_in_executor(pool, _answer, prompt, max_tokens)

        yield ask


_here: list[tuple[Pair, Any]] = []
"""A spawned process's pair and tokenizer."""


def _load(target: Path, config: StackConfig, cores: Sequence[int], ignore_eos: bool) -> None:
    os.sched_setaffinity(0, cores)
    import torch
    from outrider.drafters import load_drafter
    from outrider.engine import EngineConfig, resolve
    from outrider.engine.checkpoints.tokenizer import load_tokenizer
    from outrider.engine.loading.loader import load_engine
    from outrider.sim.pair import Pair

    torch.set_num_threads(1)
    engine = EngineConfig(prefix_cache=False)
    drafter = load_drafter(resolve(config.draft), engine=engine)
    most = PolicyConfig().max_draft_tokens
    pair = Pair(load_engine(target, engine), drafter, max_sequences=1, max_draft_tokens=most, ignore_eos=ignore_eos)
    _here.append((pair, load_tokenizer(target)))


def _answer(prompt: str, max_tokens: int) -> Sample:
    pair, tokenizer = _here[0]
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    started_s = time.monotonic()
    [answer] = pair.answer([token_ids], max_tokens, speculate=True)
    figures = AnswerFigures(
        tokens=len(answer.token_ids),
        seconds=answer.last_s - started_s,
        decode_tokens=len(answer.token_ids) - 1,
        decode_s=answer.last_s - answer.first_s,
        rounds=answer.num_steps,
        verified=answer.num_verified,
        accepted=answer.num_accepted,
    )
    return Sample(tuple(answer.token_ids), figures)
