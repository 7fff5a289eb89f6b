"""python -m benchmarks host"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click
from outrider_controller.cli.output import json_file_option

from benchmarks.report import Row, finish, show, table

if TYPE_CHECKING:
    from outrider.sequence.spec import SequenceSpec
    from outrider.target.requests.report import TargetReport
    from outrider.target.step.worker import TargetWorker
    from outrider.worker.loop import StepLoop

_DRAFTED = 4
_PROMPT, _OUTPUT, _BLOCK = 200, 3500, 16
_MAX_MS = {"greedy": 2.0, "sampled, penalties": 3.0}


@click.command("host")
@click.option("--rows", type=click.IntRange(1), default=64, show_default=True, help="Sequences of a step.")
@click.option("--steps", type=click.IntRange(10), default=200, show_default=True)
@json_file_option
def host(rows: int, steps: int, json_file: Path | None) -> int:
    """What does the step thread of a target on a GPU cost, beside the GPU?

    The model and its vocabulary are replaced by next to nothing. What is left is the thread's own work in a turn of its
    loop: 4 drafted tokens come for each sequence, the step is planned, laid out in the buffer of recorded steps and
    verified, half of each draft is accepted, and a report is made. In processor time of the thread, so that other
    processes disturb little.
    """
    found = [_measure(name, rows, steps) for name in (*_MAX_MS, "sampled, log probabilities")]
    show(
        table(found),
        f"Milliseconds of a turn with {rows} sequences of {1 + _DRAFTED} tokens; quartiles.",
    )
    return finish("host", {"holds": all(row["holds"] for row in found), "rows": found}, json_file)


def _quartiles(times: Iterable[float]) -> dict[str, float]:
    spent = sorted(times)
    return {
        "median": round(median(spent), 2),
        "25 %": round(spent[len(spent) // 4], 2),
        "75 %": round(spent[len(spent) * 3 // 4], 2),
    }


def _measure(name: str, rows: int, steps: int) -> Row:
    found, most = _quartiles(_turns(name, rows, steps)), _MAX_MS.get(name)
    holds = most is None or rows != 64 or found["median"] <= most
    return {"step": name, **found, "at most": most, "holds": holds}


def _turns(name: str, rows: int, steps: int) -> Iterator[float]:
    """Milliseconds of each turn."""
    from outrider.runtime.collector import gc_frozen
    from outrider.target.requests.events import Offered
    from outrider.tree import DraftTree
    from outrider.worker.events import Opened, SequenceKey
    from outrider.worker.loop import StepLoop

    lengths: dict[SequenceKey, int] = {}

    def deliver(report: TargetReport) -> None:
        for commit in report.commits:
            lengths[commit.key] = commit.base_len + len(commit.token_ids)

    loop: StepLoop[object, TargetReport] = StepLoop(_worker(rows), deliver)  # type: ignore[arg-type]
    keys = [SequenceKey(1, number) for number in range(rows)]
    loop.turn([Opened(key, _opening(name, number), 0.0) for number, key in enumerate(keys)])
    while len(lengths) < rows:
        loop.turn([])
    with gc_frozen():
        for _ in range(steps):
            trees = [DraftTree(length, (7, 7, 9, 9), chances=(0.9,) * 4) for length in lengths.values()]
            offers = [Offered(key, tree) for key, tree in zip(lengths, trees, strict=True)]
            began_s = time.thread_time()
            loop.turn(offers)
            yield 1000 * (time.thread_time() - began_s)


def _worker(rows: int) -> TargetWorker[Any]:
    import torch
    from outrider.sim.stack import limits_of, target_worker

    from benchmarks.support.null_engine import null_engine

    torch.set_num_threads(1)
    most, free = 8 * rows, lambda cost: 0.0
    engine = null_engine(rows, _PROMPT + _OUTPUT + _BLOCK, most)
    limits = limits_of(engine.info, rows)
    return target_worker(engine, limits, time.monotonic, max_batch_tokens=most, row_price=free)


def _opening(name: str, number: int) -> SequenceSpec:
    from outrider.options.logprobs import LogprobsOptions
    from outrider.sequence.spec import SequenceSpec
    from outrider.sequence.speculation import Speculation
    from outrider.speculation import LogitsOptions, SamplingParams, VerificationMode

    greedy = name == "greedy"
    penalties = LogitsOptions(presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.1)
    return SequenceSpec(
        prompt=tuple((3 + 7 * at + number) % 30 for at in range(_PROMPT)),
        params=SamplingParams(0.0) if greedy else SamplingParams(0.8, top_k=20, top_p=0.95, seed=number),
        mode=VerificationMode.GREEDY if greedy else VerificationMode.COUPLED,
        max_new_tokens=_OUTPUT,
        stop_token_ids=frozenset({2}),
        speculation=Speculation(max_draft_tokens=_DRAFTED),
        logits=penalties if "penalties" in name else None,
        logprobs=LogprobsOptions(num_top=5) if "log prob" in name else None,
    )
