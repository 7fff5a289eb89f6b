"""python -m benchmarks repeats"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from outrider.user_cache import cache_directory
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.models import DEFAULT_TARGET

from benchmarks.report import finish, show, table
from benchmarks.support.asking import count_option, max_tokens_option
from benchmarks.support.prompts import prompts_option, read_prompts, spread

if TYPE_CHECKING:
    from outrider.comparison.loaded import Loaded
    from outrider.local import Answered

_BAR = 1.5
_EDIT = "Add type hints and a short comment to this function, and give all of it back:\n\n```python\n{}\n```"


@click.command("repeats")
@prompts_option
@count_option(20)
@max_tokens_option(128)
@click.option("--draft", default="ngram+smollm2-135m-draft", show_default=True, help="What drafts in both arms.")
@click.option("--max-draft-tokens", type=click.IntRange(1), default=4, show_default=True, help="Of the model.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@json_file_option
def repeats(
    prompts_file: Path,
    num_prompts: int,
    max_tokens: int,
    draft: str,
    max_draft_tokens: int,
    threads: int,
    json_file: Path | None,
) -> int:
    """How much faster are answers that are given again, as an agent's edits are, when targets look up suffixes?

    Each prompt, a function that is to be edited, is answered twice in one process, greedily, by one stream; the second
    time counts. With one thread, time is that of the thread.
    """
    from outrider.comparison import CompareConfig
    from outrider.comparison.compare import Shares
    from outrider.comparison.loaded import load
    from outrider.comparison.step_line import quiet_clock
    from outrider.comparison.texts import Question

    questions = tuple(
        Question(prompt.category, ({"role": "user", "content": _EDIT.format(prompt.text)},))
        for prompt in spread(read_prompts(prompts_file), num_prompts)
    )
    arms = {"off": draft, "on": f"{draft}+suffix"}
    kept = cache_directory() / "compare"
    config = CompareConfig(
        DEFAULT_TARGET,
        tuple(arms.values()),
        questions,
        kept,
        max_new_tokens=max_tokens,
        max_draft_tokens=max_draft_tokens,
        threads=threads,
    )
    loaded = load(config, note)
    clock = quiet_clock(loaded.engine)
    seconds, answers, equal = {}, {}, True
    for arm, name in arms.items():
        note(f"suffixes {arm}: every prompt, twice")
        answers[arm], seconds[arm], same = _twice(loaded, tuple(name.split("+")), max_tokens, clock)
        equal &= same
    tokens, ratio = sum(len(text.answer) for text in loaded.texts), seconds["off"] / seconds["on"]
    shares = {arm: Shares.of(answers[arm], each, seconds["off"]) for arm, each in seconds.items()}
    rows = [
        {
            "SUFFIXES": arm,
            "TOKENS/S, SECOND TIME": f"{tokens / seconds[arm]:.1f}",
            "TOKENS/ROUND": f"{found.tokens_per_round:.1f}",
            "ACCEPTED": f"{found.acceptance:.2f}",
        }
        for arm, found in shares.items()
    ]
    show(table(rows), f"on / off: {ratio:.2f} (at least {_BAR}); texts equal: {equal}")
    body = {"holds": equal and ratio >= _BAR, "ratio": round(ratio, 3), "texts_equal": equal, "seconds": seconds}
    body |= {"shares": {arm: asdict(found) for arm, found in shares.items()}}
    return finish(
        "repeats",
        {
            **body,
            "draft": draft,
            "max_draft_tokens": max_draft_tokens,
            "num_prompts": len(questions),
            "max_tokens": max_tokens,
        },
        json_file,
    )


def _twice(
    loaded: Loaded, sources: tuple[str, ...], max_tokens: int, clock: Callable[[], float]
) -> tuple[list[Answered], float, bool]:
    """Answers all prompts, and then again → the second answers, their seconds, and whether all are the known texts."""
    pair, first = loaded.answer(loaded.engine, sources, 1, clock)
    started_s = clock()
    again = pair.answer([text.prompt for text in loaded.texts], max_tokens, speculate=True)
    seconds, known = clock() - started_s, [text.answer for text in loaded.texts]
    return again, seconds, all([each.token_ids for each in answers] == known for answers in (first, again))
