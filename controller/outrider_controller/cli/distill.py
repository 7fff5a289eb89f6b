"""outrider distill"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import click
from outrider.user_cache import cache_directory

from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.models import DEFAULT_TARGET, shipped_draft
from outrider_controller.cli.output import columns, json_file_option, note, write_json
from outrider_controller.cli.time_left import TimeLeft

if TYPE_CHECKING:
    from outrider.training.distill import DistillConfig


@click.command("distill")
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--target-model", default=DEFAULT_TARGET, show_default=True, metavar="PATH|NAME", help="The teacher.")
@click.option("--corpus-tokens", type=click.IntRange(1000), default=None, metavar="N", help="What the target writes.")
@click.option("--train-tokens", type=click.IntRange(1), default=None, metavar="N", help="Learned from, passes counted.")
@click.option("--layers", default=None, metavar="I,J,..", help="The target's layers to start from; -1 is its last.")
@click.option("--head-tokens", type=click.IntRange(1), default=None, metavar="N", help="Output vocabulary.")
@click.option("--threads", type=click.IntRange(0), default=0, metavar="N", help="Of torch; 0: its default.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--work-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="For the corpus, which a second run goes on from. Default: in ~/.cache/outrider/distill.",
)
@json_file_option
def distill(
    out: Path,
    target_model: str,
    corpus_tokens: int | None,
    train_tokens: int | None,
    layers: str | None,
    head_tokens: int | None,
    threads: int,
    seed: int,
    work_dir: Path | None,
    json_file: Path | None,
) -> int:
    """Make a draft for a target, and write it to OUT.

    The target writes conversations, user's part included, from short and long openings of many kinds. A student of a
    few of its layers then learns the target's full distribution over them. The target then answers prompts that were
    kept back, and its verifier counts what it accepts of the draft, and of the draft that is shipped for it, at
    temperatures 0 and 0.8. Hours on two cores with the defaults; --corpus-tokens and --train-tokens say how many. A
    line on stderr every 30 s says how much is done, and how long the rest will take. Ctrl-C keeps the corpus, and the
    same command goes on from it.
    """
    from outrider.engine import CheckpointError
    from outrider.training.distill import DistillConfig, run

    config = DistillConfig(
        out=out,
        # A path or an address becomes one name: the corpus does not belong into the target's own directory.
        work=work_dir or cache_directory() / "distill" / quote(target_model, safe=""),
        target=target_model,
        threads=threads,
    )
    try:
        config = replace(
            config,
            seed=seed,
            in_use=shipped_draft(target_model),
            train_tokens=train_tokens or config.train_tokens,
            corpus=replace(config.corpus, tokens=corpus_tokens or config.corpus.tokens),
            student=replace(
                config.student,
                layers=_layers(layers) if layers else config.student.layers,
                head_tokens=head_tokens or config.student.head_tokens,
            ),
        )
        note(_plan(config))
        with TimeLeft() as progress:
            result = run(config, progress)
    except (CheckpointError, ValueError) as error:
        raise CommandError(str(error)) from error
    except KeyboardInterrupt:
        raise CommandError(_kept(config), ExitCode.INTERRUPTED) from None
    rows = [[name.replace("_", " "), value] for name, value in asdict(result).items() if value is not None]
    click.echo(columns(["MEASURED", ""], rows))
    click.echo(f"\n{out} holds the draft: outrider up --draft-model {out}")
    write_json(json_file, "distill", asdict(result))
    return ExitCode.OK


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.UsageError(f"--layers: {text!r} is no list of numbers") from None


def _plan(config: DistillConfig) -> str:
    """The first line: what, where, how long, and that it can be interrupted."""
    from outrider.training.corpus import stored_tokens

    there = stored_tokens(config.work)
    return (
        f"{config.target} writes {config.corpus.tokens:,} tokens into {config.work}"
        f"{f' ({there:,} are there from an earlier run)' if there else ''}; a student learns {config.train_tokens:,} "
        f"tokens, and becomes the draft in {config.out}. With the defaults that takes hours on two cores; a line every "
        "30 s says how long the rest will take. Ctrl-C keeps the corpus; the same command goes on from it."
    )


def _kept(config: DistillConfig) -> str:
    from outrider.training.corpus import stored_tokens

    kept = stored_tokens(config.work)
    return (
        f"interrupted; {kept:,} of {config.corpus.tokens:,} tokens of the corpus are kept in {config.work}, and the "
        "same command goes on from them. Training starts from its beginning"
    )
