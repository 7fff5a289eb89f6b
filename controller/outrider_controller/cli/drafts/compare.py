"""outrider compare drafts"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from outrider.samples import read_cipher
from outrider.user_cache import cache_directory

from outrider_controller.cli.drafts.plot import Bar, bars
from outrider_controller.cli.drafts.where import found_places, link_options, where_table
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.models import DEFAULT_TARGET
from outrider_controller.cli.output import columns, emit, note, output_option

if TYPE_CHECKING:
    from outrider.comparison import Comparison
    from outrider.comparison.places import DraftPlace

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OUT = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.group("compare")
def compare_group() -> None:
    """Compare drafts by measurement."""


@compare_group.command("drafts")
@click.argument("drafts", nargs=-1, required=True, metavar="DRAFT...")
@click.option("--target-model", default=DEFAULT_TARGET, show_default=True, metavar="PATH|NAME")
@click.option(
    "--prompts", type=_FILE, default=None, metavar="FILE", help="JSON lines: prompts that the target answers."
)
@click.option(
    "--samples", type=_FILE, default=None, metavar="FILE", help="JSON lines: prompts with the target's answers."
)
@click.option(
    "--held-out",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=None,
    metavar="DIR",
    help="The corpus of an `outrider distill`: answers that it has kept back.",
)
@click.option("--samples-key-file", type=_FILE, default=None, metavar="FILE", help="Of a corpus that is encrypted.")
@click.option("--max-tokens", type=click.IntRange(2), default=128, show_default=True, help="Of an answer.")
@click.option("--max-draft-tokens", type=click.IntRange(1), default=4, show_default=True, help="Of a proposal.")
@click.option("--device", default="cpu", show_default=True, metavar="DEVICE", help="A torch device: cpu, cuda.")
@click.option("--threads", type=click.IntRange(0), default=0, metavar="N", help="Of torch; 0: its default.")
@click.option("--plot", type=_OUT, default=None, metavar="FILE", help="Also draw the figures, as SVG.")
@link_options
@output_option("table", "json")
def drafts(
    drafts: tuple[str, ...],
    target_model: str,
    prompts: Path | None,
    samples: Path | None,
    held_out: Path | None,
    samples_key_file: Path | None,
    max_tokens: int,
    max_draft_tokens: int,
    device: str,
    threads: int,
    plot: Path | None,
    output: str,
    **link: float,
) -> None:
    """Measure what each DRAFT saves a target on your prompts, and which mixture is fastest.

    A DRAFT is a draft model, of any tokenizer, or the directory of a head, by path or name; ngram, suffix, or
    prediction (for lines with a `prediction`); or several of these joined by +. The target answers the prompts
    once; the answers are kept. Then no target runs: its texts are replayed with the scheduler, the verification and
    the drafts of serving, at 1, 8 and 32 streams, and a step takes as long as it was measured to take. Target and
    drafts take turns on one device. Lines may have a `category`.

    A second table tells where heads and models should run: in the target's process, or on a draft worker behind a
    network of --round-trip and --gbit. FREED is the share of the time of the target's device that a token of plain
    decoding takes and this one does not. `outrider plan --measured` reckons the same for other networks.
    """
    from outrider.comparison import CompareConfig, compare
    from outrider.comparison.texts import read_questions
    from outrider.engine import CheckpointError, EngineConfig

    if sum(map(bool, (prompts, samples, held_out))) != 1:
        raise click.UsageError("give one of --prompts, --samples and --held-out")
    file = prompts or samples
    try:
        config = CompareConfig(
            target=target_model,
            drafts=drafts,
            questions=tuple(read_questions(file, answered=samples is not None)) if file else (),
            corpus=held_out,
            cipher=read_cipher(samples_key_file) if samples_key_file else None,
            kept=cache_directory() / "compare",
            max_new_tokens=max_tokens,
            max_draft_tokens=max_draft_tokens,
            engine=EngineConfig(device=device),
            threads=threads,
        )
        found = compare(config, note)
    except (CheckpointError, ValueError) as error:
        raise CommandError(str(error)) from error
    if plot is not None:
        plot.write_text(_plot(found))
    places = found_places(found.measured, **link)
    emit("compare-drafts", {**asdict(found), "places": list(map(asdict, places))}, output, _text(found, places))


def _text(found: Comparison, places: list[DraftPlace]) -> str:
    lines = [_table(found), "", _by_category(found), "", f"fastest at one stream: {found.best}"]
    if found.agreement is not None:
        lines.append(f"the target itself would say {found.agreement:.0%} of the answers' tokens at temperature 0")
    if found.measured.drafts:
        lines += ["", where_table(places)]
    return "\n".join(lines)


def _table(found: Comparison) -> str:
    streams = list(found.plain_tokens_per_second)
    measured = ["ACCEPTED", "OF DRAFTED", "ROUNDS WITH A HIT", "TOKENS/ROUND", "PROPOSAL"]
    header = ["DRAFT", *measured, *(f"x PLAIN, {n}" for n in streams)]
    rows = [
        [
            each.name,
            f"{each.all.acceptance:.3f}",
            f"{each.all.of_drafted:.3f}",
            f"{each.all.hits:.3f}",
            f"{each.all.tokens_per_round:.2f}",
            f"{each.proposal_ms:.2f} ms",
            *(f"{each.times_plain[n]:.2f}" for n in streams),
        ]
        for each in found.drafts
    ]
    return columns(header, rows)


def _by_category(found: Comparison) -> str:
    """Times plain at one stream."""
    rows = [
        [category, *(f"{each.categories[category].times_plain:.2f}" for each in found.drafts)]
        for category in found.drafts[0].categories
    ]
    return columns(["x PLAIN, 1 STREAM", *(each.name for each in found.drafts)], rows)


def _plot(found: Comparison) -> str:
    return bars(
        "Times plain decoding, by the number of streams",
        [
            Bar(each.name, {f"{n} stream{'s' * (n > 1)}": value for n, value in each.times_plain.items()})
            for each in found.drafts
        ],
        line=1.0,
    )
