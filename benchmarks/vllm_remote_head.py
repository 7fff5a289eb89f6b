"""python -m benchmarks.vllm_remote_head: of a head on a draft worker, the target on vLLM, is as much accepted as of the
same head in a target of our own engine?

Both in float32. Steps and messages take turns in one process, so no draft is late. Our own engine verifies trees and
vLLM chains: main guesses are compared. Needs vLLM in the environment. On a CPU its kernels run in Triton's interpreter:
the default is a few short answers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from outrider.draft.worker import DraftWorker
from outrider.drafters.head import HeadDrafter
from outrider.engine import EngineConfig, resolve
from outrider.engine.checkpoints.fetching import directory
from outrider.engine.loading.loader import load_engine
from outrider.heads import HeadFeatures
from outrider.heads.loading import load_head_of
from outrider.sequence.spec import SequenceSpec
from outrider.target.drafts.head import head_drafts
from outrider.target.requests.limits import Limits
from outrider.target.step.worker import TargetWorker
from outrider.tree import common_len
from outrider.vllm.target.machine import VllmEngine
from outrider_controller.cli.output import json_file_option

from benchmarks.report import finish, show, table
from benchmarks.scenarios.remote_heads import ASKED, read_token_ids
from benchmarks.support.prompts import prompts_option
from tests.unit.drafters.remote_pair import Remote
from tests.unit.target.harness import Bench, WorkerBench, opening
from tests.vllm.served import SMALL, loaded

_FLOAT32 = EngineConfig(dtype="float32", prefix_cache=False, execution="transformers")


@click.command("vllm-remote-head")
@prompts_option
@click.option("--target-model", default="smollm2-135m-instruct", show_default=True, metavar="PATH|NAME")
@click.option("--head", default="smollm2-135m-mtp", show_default=True, metavar="PATH|NAME")
@click.option("--count", type=click.IntRange(1), default=4, show_default=True, help="Prompts.")
@click.option("--longest", type=click.IntRange(1), default=60, show_default=True, help="Most tokens of a prompt.")
@click.option("--tokens", type=click.IntRange(1), default=32, show_default=True, help="Of each answer.")
@json_file_option
def main(
    prompts_file: Path, target_model: str, head: str, count: int, longest: int, tokens: int, json_file: Path | None
) -> int:
    """Acceptance of a head on a draft worker, the target on vLLM, beside that of the head in our own target."""
    # vLLM's worker is a fork, in which no thread of torch's would answer.
    torch.set_num_threads(1)
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
    model, where = resolve(target_model), directory(head)
    prompts = read_token_ids(model, prompts_file, count, longest)
    what = [opening(prompt, max_new_tokens=tokens, speculation=ASKED) for prompt in prompts]
    local, remote = _in_the_target(model, where, what), _on_vllm(model, where, what)
    (accepted, of), (remote_accepted, remote_of) = _main_guesses(local), _main_guesses(remote)
    ratio = remote_accepted / remote_of / (accepted / of)
    equal = sum(remote.tokens[name] == text for name, text in local.tokens.items())
    rows = [
        {"head": "in the target", "accepted": accepted, "of": of},
        {"head": "on a worker, vLLM", "accepted": remote_accepted, "of": remote_of, "of the target's": ratio},
    ]
    show(table(rows), f"{equal} of {len(what)} texts are equal.")
    return finish("vllm-remote-head", {"acceptance": rows, "equal": equal, "holds": ratio >= 0.98}, json_file)


def _in_the_target(model: Path, head: Path, what: Sequence[SequenceSpec]) -> WorkerBench:
    engine = load_engine(model, EngineConfig(dtype="float32", num_blocks=1024, prefix_cache=False))
    source = head_drafts(engine, load_head_of(model, head, "cpu")[0])
    bench = Bench(model, sources=[source], wrap=lambda _: engine, row_price=lambda cost: 0.0, num_blocks=8)
    for number, one in enumerate(what):
        bench.open(number, one)
    bench.run()
    return bench


def _on_vllm(model: Path, head: Path, what: Sequence[SequenceSpec]) -> WorkerBench:
    args = f"{SMALL} --block-size=32 --max-model-len=512"
    with loaded(model, args, remote_head=str(head)) as target:
        info, engine, source = target.info, VllmEngine(target.core), HeadFeatures("head", ())
        limits = Limits(info.vocab_size, info.max_context_len, info.block_size, info.num_blocks - 1, len(what))
        bench = WorkerBench(limits, lambda clock: TargetWorker(engine, limits, clock, [source]))
        remote = Remote(bench, DraftWorker(HeadDrafter.load(head, model, _FLOAT32), len(what)))
        for number, one in enumerate(what):
            remote.open(number, one)
        remote.run()
    return bench


def _main_guesses(bench: WorkerBench) -> tuple[int, int]:
    """Of their tokens those accepted, and those verified: up to the first that was not."""
    accepted = verified = 0
    for row in [row for answer in bench.answers.values() for row in answer.commits]:
        guess = row.draft.guess()[: ASKED.max_draft_tokens]
        count = common_len(row.token_ids, guess)
        accepted += count
        verified += count + (count < min(len(guess), len(row.token_ids)))
    return accepted, verified


if __name__ == "__main__":
    sys.exit(main(standalone_mode=False))
