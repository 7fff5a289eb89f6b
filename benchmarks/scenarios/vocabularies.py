"""python -m benchmarks vocabularies"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.models import DEFAULT_TARGET

from benchmarks.report import Row, finish, show, table
from benchmarks.support.asking import count_option, max_tokens_option
from benchmarks.support.prompts import prompts_option, read_prompts, spread

if TYPE_CHECKING:
    from outrider.local import Answered

_TEMPERATURES = (0.0, 0.8)
_CONCURRENCY = 8


@click.command("vocabularies")
@prompts_option
@count_option(24)
@max_tokens_option(64)
@click.option("--other", default="", metavar="PATH|NAME", help="A model; default: Gemma 3 270M, which is fetched.")
@click.option("--reverse", is_flag=True, help="The other model is the target.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of both models.")
@click.option("--threads", type=click.IntRange(0), default=0, metavar="N", help="Of torch; 0: its default.")
@json_file_option
def vocabularies(
    prompts_file: Path,
    num_prompts: int,
    max_tokens: int,
    other: str,
    reverse: bool,
    dtype: str,
    threads: int,
    json_file: Path | None,
) -> int:
    """How much is accepted of what a model with another tokenizer drafts, and are the texts equal?

    Each round drafts one token, which the real verifier verifies: greedily, and coupled at temperature 0.8. Both models
    answer with their own chat template, or to the bare prompt where there is none.
    """
    import torch
    from outrider.engine import resolve

    from benchmarks.support.packaged import packaged

    torch.set_num_threads(threads or torch.get_num_threads())
    pair = resolve(DEFAULT_TARGET, note), resolve(other or packaged("gemma-3-270m", note), note)
    target, draft = reversed(pair) if reverse else pair
    prompts = [prompt.text for prompt in spread(read_prompts(prompts_file), num_prompts)]
    measured = list(_measured(target, draft, prompts, max_tokens, dtype))
    show(table([_row(each) for each in measured]))
    holds = all(each["texts_equal"] == len(prompts) for each in measured)
    found = {"target": target.name, "draft": draft.name, "num_prompts": len(prompts), "measured": measured}
    return finish("vocabularies", {"holds": holds, **found}, json_file)


def _measured(
    target: Path, draft: Path, prompts: Sequence[str], max_tokens: int, dtype: str
) -> Iterator[dict[str, Any]]:
    from outrider.drafters import ModelConfig, load_drafter
    from outrider.engine import EngineConfig
    from outrider.engine.checkpoints.tokenizer import load_tokenizer
    from outrider.engine.models.loader import load_engine
    from outrider.local import Pair
    from outrider.speculation import SamplingParams
    from outrider.training.texts import prompt_ids

    config = EngineConfig(dtype=dtype, prefix_cache=False)
    every = ModelConfig(min_confidence=0.0, num_alternatives=0)
    drafter = load_drafter(draft, engine=config, model=every, target=target)
    pair = Pair(
        load_engine(target, config),
        drafter,
        max_sequences=_CONCURRENCY,
        max_draft_tokens=1,
        row_price=lambda cost: 0.0,
        lookups=(),
    )
    tokenizer = load_tokenizer(target)
    ids = [prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in prompts]
    for temperature in _TEMPERATURES:
        params = SamplingParams(temperature=temperature, seed=7)
        plain = pair.answer(ids, max_tokens, speculate=False, params=params)
        drafted = pair.answer(ids, max_tokens, speculate=True, params=params)
        yield {"temperature": temperature, **_figures(plain, drafted)}


def _figures(plain: Sequence[Answered], drafted: Sequence[Answered]) -> dict[str, Any]:
    accepted, verified = (sum(getattr(each, name) for each in drafted) for name in ("num_accepted", "num_verified"))
    equal = sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted, strict=True))
    rounds = sum(each.num_steps for each in drafted)
    return {
        "acceptance": round(accepted / max(verified, 1), 4),
        "rounds_with_a_draft": round(verified / max(rounds, 1), 4),
        "texts_equal": equal,
        "texts": len(plain),
    }


def _row(each: dict[str, Any]) -> Row:
    return {
        "TEMPERATURE": each["temperature"],
        "ACCEPTED": f"{each['acceptance']:.3f}",
        "ROUNDS WITH A DRAFT": f"{each['rounds_with_a_draft']:.2f}",
        "TEXTS EQUAL": f"{each['texts_equal']} of {each['texts']}",
    }
