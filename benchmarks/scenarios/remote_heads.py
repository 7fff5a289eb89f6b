"""python -m benchmarks remote-heads"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from outrider.draft.worker import DraftWorker
from outrider.drafters.head import HeadDrafter
from outrider.drafting.source import DraftSource
from outrider.engine import Engine, EngineConfig, resolve
from outrider.engine.checkpoints.fetching import directory
from outrider.engine.checkpoints.tokenizer import load_tokenizer
from outrider.engine.loading.loader import load_engine
from outrider.heads.loading import load_head_of
from outrider.sequence.speculation import Speculation
from outrider.target.drafts.head import head_drafts, head_features
from outrider_controller.cli.output import json_file_option

from benchmarks.report import finish, show, table
from benchmarks.support.feature_stream import RATE, sent_features
from benchmarks.support.prompts import prompts_option, read_prompts
from tests.unit.drafters.remote_pair import Remote
from tests.unit.target.harness import Bench, opening

_LENGTH, _LONGEST = 64, 400
ASKED = Speculation(max_draft_tokens=4, max_own_draft_tokens=4)
_STEPS, _STEP_TOKENS = 120, 512


@click.command("remote-heads")
@prompts_option
@click.option("--target-model", default="smollm2-135m-instruct", show_default=True, metavar="PATH|NAME")
@click.option("--head", default="smollm2-135m-mtp", show_default=True, metavar="PATH|NAME")
@click.option("--count", type=click.IntRange(1), default=40, show_default=True, help="Prompts.")
@json_file_option
def remote_heads(prompts_file: Path, target_model: str, head: str, count: int, json_file: Path | None) -> int:
    """What does a head cost and bring on a draft worker, instead of in the target?

    Acceptance with each form of features, over messages; bytes and losses of 11,000 tokens a second of 256 sequences
    over loopback with 5 ms added to the round trip; a target's step with features sent and not, in turns, on one core.
    """
    torch.set_num_threads(1)
    model, where = resolve(target_model), directory(head)
    # What one way has read must not be there for the next.
    engine = load_engine(model, EngineConfig(num_blocks=2048, max_batch_tokens=_STEP_TOKENS, prefix_cache=False))
    pair = Pair(model, where, engine)
    accepted = _acceptance(pair, read_token_ids(model, prompts_file, count, _LONGEST))
    width: int = pair.head().settings.width
    wire = sent_features(width)
    steps = [_step(pair, number) for number in (1, 8)]
    show(table(accepted), table([wire]), table(steps))
    # A sender that falls behind proves nothing of its rate.
    sent = wire["tokens/s"] >= 0.98 * RATE and wire["lost"] == 0 and wire["x the numbers"] <= 1.1
    equal = all(row["equal texts"] == row["of"] for row in accepted)
    holds = equal and sent and all(row["of the target's"] >= 0.98 for row in accepted)
    return finish("remote-heads", {"acceptance": accepted, "wire": wire, "steps": steps, "holds": holds}, json_file)


@dataclass(frozen=True)
class Pair:
    model: Path
    where: Path
    engine: Engine

    def head(self) -> Any:
        return load_head_of(self.model, self.where, "cpu")[0]

    def bench(self, *sources: DraftSource) -> Bench:
        """All targets have one engine."""
        return Bench(
            self.model,
            sources=sources,
            wrap=lambda _: self.engine,
            row_price=lambda cost: 0.0,
            num_blocks=8,
            max_batch_tokens=_STEP_TOKENS,
            arithmetic=EngineConfig(),
        )


def read_token_ids(model: Path, file: Path, count: int, longest: int) -> list[list[int]]:
    """Of prompts with at most so many tokens, as a chat has them."""
    tokenizer, found = load_tokenizer(model), list[list[int]]()
    for prompt in read_prompts(file):
        said = [{"role": "user", "content": prompt.text}]
        text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= longest:
            found.append(list(ids))
    return found[:: max(1, len(found) // count)][:count]


# -- acceptance


def _acceptance(pair: Pair, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """All prompts in one batch; each drafted token is verified."""
    what = [opening(prompt, max_new_tokens=_LENGTH, speculation=ASKED) for prompt in prompts]
    local = pair.bench(head_drafts(pair.engine, pair.head()))
    for number, one in enumerate(what):
        local.open(number, one)
    local.run()
    found = {"in the target": local}
    for name, bits in {"on a worker": 16, "on a worker, 8 bits": 8}.items():
        bench = pair.bench(head_features(pair.engine, pair.head(), bits))
        drafter = HeadDrafter.load(pair.where, pair.model, EngineConfig(prefix_cache=False))
        remote = Remote(bench, DraftWorker(drafter, len(what)))
        for number, one in enumerate(what):
            remote.open(number, one)
        remote.run()
        found[name] = bench
    rows, kind = list[dict[str, Any]](), pair.head().kind
    for name, bench in found.items():
        stats = bench.worker.stats.of_source(kind)
        share = stats.num_accepted / stats.num_verified
        rows.append(
            {
                "head": name,
                "accepted": share,
                "of drafted": stats.num_accepted / stats.num_drafted,
                "of the target's": share / rows[0]["accepted"] if rows else 1.0,
                "equal texts": sum(tokens == local.tokens[name] for name, tokens in bench.tokens.items()),
                "of": len(bench.tokens),
            }
        )
    return rows


# -- a target's step


def _step(pair: Pair, sequences: int) -> dict[str, Any]:
    """Milliseconds of the step thread and of the clock, with features sent and not, in turns."""
    drawn, benches = random.Random(1), [pair.bench(), pair.bench(head_features(pair.engine, pair.head()))]
    for bench in benches:
        for number in range(sequences):
            prompt = [drawn.randrange(5, 4000) for _ in range(30)]
            bench.open(number, opening(prompt, max_new_tokens=_STEPS + 30, speculation=ASKED))
    times: list[list[tuple[float, float]]] = [[], []]
    for turn in range(_STEPS):
        for bench, kept in zip(benches, times, strict=True):
            began = time.thread_time(), time.perf_counter()
            bench.step()
            if turn >= 10:
                kept.append((time.thread_time() - began[0], time.perf_counter() - began[1]))
    assert sum(len(report.features) for report in benches[1].reports) >= _STEPS * sequences
    found: dict[str, Any] = {"sequences": sequences}
    for which, name in enumerate(("CPU", "clock")):
        off, on = ([each[which] for each in kept] for kept in times)
        found[f"{name} ms"] = 1e3 * statistics.median(off)
        found[f"x {name}, sent"] = statistics.median(b / a for a, b in zip(off, on, strict=True))
    for bench in benches:
        for number in range(sequences):
            bench.close(number)
    return found
