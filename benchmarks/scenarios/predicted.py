"""python -m benchmarks predicted"""

from __future__ import annotations

import itertools
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
    from outrider.comparison import CompareConfig

_BAR = 0.1


@click.command("predicted")
@prompts_option
@count_option(24)
@max_tokens_option(96)
@click.option("--draft", "drafts", multiple=True, default=("smollm2-135m-draft", "ngram"), show_default=True)
@click.option("--streams", multiple=True, type=int, default=(1, 8, 32), show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@json_file_option
def predicted(
    prompts_file: Path,
    num_prompts: int,
    max_tokens: int,
    drafts: tuple[str, ...],
    streams: tuple[int, ...],
    threads: int,
    json_file: Path | None,
) -> int:
    """How near is `outrider compare drafts` to what one process measures?

    For each draft and number of streams: times plain decoding as predicted, and as measured with the same models,
    prompts and scheduler. They must be within 10 % of each other. With one thread, time is that of the thread.
    """
    from outrider.comparison import CompareConfig, compare
    from outrider.comparison.texts import Question

    questions = [
        Question(prompt.category, ({"role": "user", "content": prompt.text},))
        for prompt in spread(read_prompts(prompts_file), num_prompts)
    ]
    kept = cache_directory() / "compare"
    config = CompareConfig(
        DEFAULT_TARGET, drafts, tuple(questions), kept, streams, max_new_tokens=max_tokens, threads=threads
    )
    found = compare(config, note)
    said = {each.name: each.times_plain for each in found.drafts}
    measured = _measured(config)
    rows = [
        {
            "draft": draft,
            "streams": count,
            "predicted": round(said[draft][count], 3),
            "measured": round(real, 3),
            "ratio": round(said[draft][count] / real, 3),
        }
        for (draft, count), real in measured.items()
    ]
    show(table([{name.upper(): str(value) for name, value in row.items()} for row in rows]))
    holds = all(abs(said[draft][count] / real - 1) <= _BAR for (draft, count), real in measured.items())
    return finish("predicted", {"holds": holds, "settings": rows}, json_file)


def _measured(config: CompareConfig) -> dict[tuple[str, int], float]:
    """(draft, streams) → times plain, by the target itself."""
    from outrider.comparison.loaded import load
    from outrider.comparison.step_line import quiet_clock

    loaded = load(config, note)
    clock = quiet_clock(loaded.engine)

    def seconds(parts: tuple[str, ...], streams: int) -> float:
        note(f"measures {'+'.join(parts) or 'plain decoding'}, streams: {streams}")
        started_s = clock()
        loaded.answer(loaded.engine, parts, streams, clock)
        return clock() - started_s

    plain = {streams: seconds((), streams) for streams in config.streams}
    settings = itertools.product(config.mixtures, config.streams)
    return {("+".join(parts), streams): plain[streams] / seconds(parts, streams) for parts, streams in settings}
