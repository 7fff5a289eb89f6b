"""vLLM on this GPU beside `benchmarks.gpu`: the same shape, random weights, greedy, as it comes or with the plugin.

    PYTHONPATH=services python -m benchmarks.gpu_vllm --plugin --json FILE

The plugin has no drafts here, so that it shows what its flags cost. A token's time is that of long answers less that of
short ones, by the number of tokens between: prompts and the start of a request cancel.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import SHAPES, llama_config

_SHORT = 8
_PLUGIN = {
    "scheduler_cls": "outrider.vllm.plugin.Scheduler",
    "worker_cls": "outrider.vllm.worker.Worker",
    "speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 4},
    "additional_config": {"outrider": {}},
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="8b")
    add("--dtype", default="bfloat16")
    add("--rows", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="streams")
    add("--context", type=int, default=512, metavar="TOKENS", help="of each prompt")
    add("--tokens", type=int, default=64, metavar="N", help="timed, of each stream")
    add("--plugin", action="store_true")
    add("--vllm", type=json.loads, default={}, metavar="JSON", help="more arguments of vLLM's engine")
    add("--json", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    # One process; its usual sampler needs a package of its own; other plugins than the one measured stay out.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_PLUGINS": "outrider" if options.plugin else ""}
    with tempfile.TemporaryDirectory() as model:
        llm = engine(Path(model), options)
        steps = [
            {"context": options.context, "rows": rows, "positions": 1, "step_ms": token_ms(llm, rows, options)}
            for rows in options.rows
        ]
    options.json.write_text(json.dumps({"steps": steps}, indent=2) + "\n")
    print(*steps, sep="\n")
    return 0


def engine(model: Path, options: argparse.Namespace) -> Any:
    from vllm import LLM

    config = llama_config(options.shape, options.dtype, bos_token_id=1, eos_token_id=2)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(model)
    return LLM(
        str(model),
        load_format="dummy",
        dtype=options.dtype,
        skip_tokenizer_init=True,
        max_model_len=options.context + options.tokens + 2 * _SHORT,
        max_num_seqs=64,
        enable_prefix_caching=False,
        seed=0,
        **({"gpu_memory_utilization": 0.6} | (_PLUGIN if options.plugin else {}) | options.vllm),
    )


def token_ms(llm: Any, rows: int, options: argparse.Namespace) -> float:
    from vllm import SamplingParams

    rng = random.Random(3)
    vocabulary = SHAPES[options.shape]["vocab_size"]
    prompts = [[rng.randrange(3, vocabulary) for _ in range(options.context)] for _ in range(rows)]

    def answer_s(count: int) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        began_s = time.perf_counter()
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        took_s = time.perf_counter() - began_s
        if any(len(each.outputs[0].token_ids) != count for each in found):
            raise RuntimeError(f"an answer has not {count} tokens")
        return took_s

    answer_s(_SHORT)
    more = _SHORT + options.tokens
    took_s = statistics.median(answer_s(more) - answer_s(_SHORT) for _ in range(3))
    return 1e3 * took_s / float(options.tokens)


if __name__ == "__main__":
    sys.exit(main())
