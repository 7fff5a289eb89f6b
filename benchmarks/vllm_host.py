"""python -m benchmarks.vllm_host: CPU time of vLLM's scheduler in a step, alone and with Outrider's plugin.

The model is left out: each step commits made-up tokens. The plugin is the real one; drafts come by the way that those
of draft workers come. Times are of the thread that schedules: the connections to draft workers have their own.

Needs vLLM in the environment, and no GPU.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}

NUM_DRAFTED, PROMPT_LEN, BLOCK, RIGHT, VOCAB = 4, 64, 16, 0.7, 384
SHARES = (0.0, 0.25, 1.0)


def make_scheduler(model: Path, running: int, *, plugin: bool, num_blocks: int = 0, **more: Any) -> Any:
    """`more`: further arguments of vLLM's engine."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    more = {"async_scheduling": True, "max_model_len": 8192, "max_num_batched_tokens": 8192} | more
    if plugin:
        more |= {
            "scheduler_cls": "outrider.vllm.plugin.Scheduler",
            "worker_cls": "outrider.vllm.worker.Worker",
            "speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": NUM_DRAFTED},
            "additional_config": {"outrider": {"row_price": 0}},
        }
    config = EngineArgs(str(model), max_num_seqs=running, enforce_eager=True, **more).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks = num_blocks or running * 8192 // BLOCK
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    made = config.scheduler_config.get_scheduler_cls()
    return made(config, cache, StructuredOutputManager(config), BLOCK, log_stats=True)


def add_requests(scheduler: Any, running: int) -> None:
    rng = random.Random(1)
    for number in range(running):
        prompt = [rng.randrange(VOCAB) for _ in range(PROMPT_LEN)]
        scheduler.add_request(new_request(str(number), prompt, 8000))


def new_request(name: str, prompt: list[int], max_tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(name, prompt, params, None, block_hasher=get_request_block_hasher(BLOCK, sha256))


def outputs(scheduler: Any, step: Any, rng: random.Random) -> Any:
    """As of a model that accepts each drafted token with a chance."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(step.num_scheduled_tokens)
    tokens: list[list[int]] = []
    for name in names:
        request = scheduler.requests[name]
        if request.num_tokens + request.num_output_placeholders > request.num_computed_tokens + 1:
            tokens.append([])
            continue
        count = len(step.scheduled_spec_decode_tokens.get(name, ()))
        accepted = next((n for n in range(count) if rng.random() > RIGHT), count)
        tokens.append([(request.num_tokens + n) % VOCAB for n in range(accepted + 1)])
    return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, tokens)


class Run:
    """One scheduler, and what its steps take."""

    def __init__(self, scheduler: Any, before: Callable[[], None] = lambda: None) -> None:
        self.scheduler, self.before, self.rng = scheduler, before, random.Random(2)
        self.pending: Any = None
        self.took_ms: list[float] = []

    def step(self) -> None:
        """As with asynchronous scheduling: a step is scheduled while the one before it runs."""
        self.before()
        began = time.process_time()
        step = self.scheduler.schedule()
        took_s = time.process_time() - began
        if self.pending is not None:
            result = outputs(self.scheduler, self.pending, self.rng)
            began = time.process_time()
            self.scheduler.update_from_output(self.pending, result)
            self.took_ms.append(1e3 * (took_s + time.process_time() - began))
        self.pending = step

    @property
    def ms(self) -> float:
        """CPU ms of schedule and update, in the median step after the first quarter."""
        return statistics.median(self.took_ms[len(self.took_ms) // 4 :])


class Pool:
    """In the place of the connections to draft workers: what they would have brought."""

    def __init__(self) -> None:
        self.arrived: list[Any] = []
        self.actions: list[Callable[[Any], None]] = []
        self.keys: list[Any] = []

    def tell(self, action: Callable[[Any], None]) -> None:
        self.actions.append(action)

    def work(self) -> None:
        """What its own thread does."""
        actions, self.actions = self.actions, []
        for action in actions:
            action(self)

    def poll(self) -> Sequence[Any]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def wait(self, seconds: float) -> bool:
        """Nothing is owed: all has arrived."""
        return bool(self.arrived)

    def open(self, opened: Any, announced: Any) -> None:
        self.keys.append(opened.key)

    def step(self, report: Any) -> None: ...

    def stop(self) -> None: ...


def arriving(scheduler: Any, pool: Pool, share: float) -> Callable[[], None]:
    """Before each step, a draft of that share of the requests: longer than a step, as for asynchronous scheduling."""
    from outrider.target.requests.events import Offered
    from outrider.tree import DraftTree
    from outrider.vllm.server.server_drafts import Followed

    pool.work()
    pool.arrived += [Followed(key) for key in pool.keys[: round(share * len(pool.keys))]]

    def arrive() -> None:
        pool.work()
        count = round(share * len(scheduler.running))
        for request, key in zip(scheduler.running[:count], pool.keys, strict=False):
            at, depth = request.num_tokens, 2 * NUM_DRAFTED + 1
            ids, chances = tuple((at + n) % VOCAB for n in range(depth)), (RIGHT,) * depth
            tree = DraftTree(at, ids, chances=chances, source="model", serial=1, epoch=at)
            pool.arrived.append(Offered(key, tree, time.monotonic()))

    return arrive


def prepared(model: Path, running: int, share: float | None) -> Run:
    """`share`: of the requests with drafts. None: vLLM alone."""
    scheduler, pool = make_scheduler(model, running, plugin=share is not None), Pool()
    if share is not None:
        scheduler.feed._pool = pool
    add_requests(scheduler, running)
    return Run(scheduler, arriving(scheduler, pool, share)) if share else Run(scheduler)


def speculating(model: Path, running: int) -> Run:
    """vLLM with as many drafted tokens, of its own n-grams."""
    own = {"method": "ngram_gpu", "num_speculative_tokens": NUM_DRAFTED}
    scheduler = make_scheduler(model, running, plugin=False, speculative_config=own)
    add_requests(scheduler, running)
    return Run(scheduler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    from outrider.testing.tiny import tiny_checkpoint

    with tempfile.TemporaryDirectory() as directory:
        model = tiny_checkpoint(Path(directory) / "tiny", head_dim=32)
        for running in given.running:
            runs = {"vLLM alone": prepared(model, running, None), "its own drafts": speculating(model, running)}
            runs |= {f"plugin, drafts for {share:.0%}": prepared(model, running, share) for share in SHARES}
            for _ in range(given.steps):
                # In turns: whatever else the machine does slows all of them.
                for run in runs.values():
                    run.step()
            alone = runs["vLLM alone"].ms
            said = "; ".join(f"{name} {run.ms:.2f} = {run.ms / alone:.2f} x" for name, run in runs.items())
            print(f"{running} running, CPU ms a step: {said}", flush=True)


if __name__ == "__main__":
    main()
