"""python -m tests.vllm.vllm_alone MODEL TOKENS < PROMPTS: answers by vLLM's `LLM`, with nothing of this package.

PROMPTS is a JSON list of lists of token ids. The last line of the output has a list of greedy answers, and one of those
with the seeds 1001, 1002, ….
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEMPERATURE, TOP_P, FIRST_SEED = 0.8, 0.95, 1001
Answers = list[list[int]]


def alone(model: Path, prompts: Sequence[Sequence[int]], count: int) -> tuple[Answers, Answers]:
    """The answers, of so many tokens each, by a process that has ended then."""
    command = [sys.executable, "-m", "tests.vllm.vllm_alone", str(model), str(count)]
    given, one_process = (
        json.dumps(list(map(list, prompts))),
        os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": ""},
    )
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, env=one_process)
    assert done.returncode == 0
    greedy, seeded = json.loads(done.stdout.splitlines()[-1])
    return greedy, seeded


def _answers(model: str, prompts: Sequence[Sequence[int]], count: int) -> tuple[Answers, Answers]:
    from vllm import LLM, SamplingParams

    options = {"max_model_len": 512, "max_num_seqs": 40, "max_num_batched_tokens": 512, "enforce_eager": True}
    llm = LLM(model, dtype="float32", kv_cache_memory_bytes=200_000_000, skip_tokenizer_init=True, **options)
    more = {"max_tokens": count, "ignore_eos": True, "detokenize": False}
    greedy = [SamplingParams(temperature=0, **more) for _ in prompts]
    seeds = range(FIRST_SEED, FIRST_SEED + len(prompts))
    seeded = [SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, seed=seed, **more) for seed in seeds]
    asked: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    found = [llm.generate(asked, sampling, use_tqdm=False) for sampling in (greedy, seeded)]
    assert not [name for name in sys.modules if name.partition(".")[0] == "outrider"]
    one, other = ([list(each.outputs[0].token_ids) for each in done] for done in found)
    return one, other


if __name__ == "__main__":
    print(json.dumps(_answers(sys.argv[1], json.load(sys.stdin), int(sys.argv[2]))))
