"""python -m tests.vllm.vllm_alone MODEL TOKENS < PROMPTS: greedy answers by vLLM's `LLM`, with nothing of this package.

PROMPTS is a JSON list of lists of token ids. The last line of the output is a list of the answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def alone(model: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The answers, of so many tokens each, by a process that has ended then."""
    command = [sys.executable, "-m", "tests.vllm.vllm_alone", str(model), str(count)]
    given, one_process = (
        json.dumps(list(map(list, prompts))),
        os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": ""},
    )
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, env=one_process)
    assert done.returncode == 0
    answers: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def _answers(model: str, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    options = {"max_model_len": 512, "max_num_seqs": 40, "max_num_batched_tokens": 512, "enforce_eager": True}
    llm = LLM(model, dtype="float32", kv_cache_memory_bytes=200_000_000, skip_tokenizer_init=True, **options)
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    done = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling, use_tqdm=False)
    assert not [name for name in sys.modules if name.partition(".")[0] == "outrider"]
    return [list(one.outputs[0].token_ids) for one in done]


if __name__ == "__main__":
    print(json.dumps(_answers(sys.argv[1], json.load(sys.stdin), int(sys.argv[2]))))
