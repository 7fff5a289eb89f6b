"""A real acceptance process: for each token of real answers, whether a draft foretells it.

The answers are those of the shipped target at temperature 0, and a bit is 1 where the shipped draft's first choice is
the token. A chain of K drafted tokens is accepted up to the first 0, so the bits say what any round accepts.

`python -m tests.acceptance_process PROMPTS` records them anew: a file of JSON lines with `prompt`, as distill reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).parent / "acceptance_process.txt"
NUM_ANSWERS, ANSWER_TOKENS = 240, 128


def read() -> list[tuple[bool, ...]]:
    """One row for each answer."""
    return [tuple(bit == "1" for bit in line) for line in FILE.read_text().splitlines()]


def record(prompts: Path) -> Iterator[str]:
    import torch
    from outrider.engine import EngineConfig, resolve
    from outrider.engine.checkpoints.tokenizer import load_tokenizer
    from outrider.engine.loading.draft_checkpoint import load_draft_model
    from outrider.engine.loading.loader import load_engine
    from outrider.sim.pair import Pair
    from outrider.training.texts import prompt_ids, read_prompts

    target, draft = resolve("smollm2-135m-instruct"), resolve("smollm2-135m-draft")
    engine = load_engine(target, EngineConfig(prefix_cache=False, num_blocks=4096))
    tokenizer = load_tokenizer(target)
    asked = [list(prompt_ids(tokenizer, one)) for one in read_prompts(prompts)[:NUM_ANSWERS]]
    answers = Pair(engine, None, max_sequences=16).answer(asked, ANSWER_TOKENS, speculate=False)
    model, token_map = load_draft_model(draft, torch.float32)
    model.set_attn_implementation("sdpa")
    for prompt, answer in zip(asked, answers, strict=True):
        text = torch.tensor([*prompt, *answer.token_ids])
        with torch.no_grad():
            choices = token_map[model(text[None, :-1]).logits[0].argmax(-1)]
        bits = choices[len(prompt) - 1 :] == text[len(prompt) :]
        yield "".join("01"[int(bit)] for bit in bits)


if __name__ == "__main__":
    FILE.write_text("\n".join(record(Path(sys.argv[1]))) + "\n")
