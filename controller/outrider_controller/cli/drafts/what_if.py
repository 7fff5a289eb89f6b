"""outrider plan --what-if: what recorded requests would take and cost on a fleet that does not exist yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from outrider.limits import MAX_DRAFT_TOKENS

from outrider_controller.cli.asking import NumberRange, duration
from outrider_controller.cli.drafts.plot import Bar, bars
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import columns, emit, note

if TYPE_CHECKING:
    from outrider_controller.whatif.forecast import Fleet, Forecast, Prices, Question
    from outrider_controller.whatif.recorded import Recording
    from outrider_controller.whatif.texts import Text

F = TypeVar("F", bound=Callable[..., Any])
_IN = click.Path(exists=True, dir_okay=False, path_type=Path)
_OUT = click.Path(dir_okay=False, writable=True, path_type=Path)


def _mix(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, float]:
    found = {}
    for tenant, is_given, share in (value.rpartition("=") for value in values):
        try:
            found[tenant] = float(share)
        except ValueError:
            is_given = ""
        if not is_given or not found[tenant] >= 0:
            raise click.BadParameter("TENANT=WEIGHT, with a weight of at least 0")
    return found


_OPTIONS = (
    click.option(
        "--what-if",
        type=_IN,
        metavar="FILE",
        help="Rounds of `outrider trace export`: replays them. The options from here on need it.",
    ),
    click.option("--draft", metavar="NAME", help="Requests that this draft served; default: all."),
    click.option(
        "--rtt", callback=duration, default="0ms", help="Network round trip to add between target and draft: 5ms."
    ),
    click.option("--streams", type=click.IntRange(1), default=1, show_default=True, help="Requests at once, in all."),
    click.option("--targets", type=click.IntRange(1), default=1, show_default=True, help="Targets."),
    click.option("--drafts", type=click.IntRange(0), help="Draft workers; default: one for each target."),
    click.option(
        "--max-draft-tokens",
        type=click.IntRange(0, MAX_DRAFT_TOKENS),
        help="Most drafted tokens per step; default: a router's.",
    ),
    click.option("--mode", type=click.Choice(["auto", "on"]), default="auto", show_default=True),
    click.option("--row-price/--no-row-price", default=True, help="Whether a drafted token has to be worth its row."),
    click.option("--lookups/--no-lookups", default=True, help="Whether the target's own drafts are replayed too."),
    click.option(
        "--mix",
        multiple=True,
        callback=_mix,
        metavar="TENANT=WEIGHT",
        help="Share of each tenant's requests; may be repeated.",
    ),
    click.option("--price-h100", type=NumberRange(0), default=1.0, help="Price of a target's GPUs for an hour."),
    click.option("--price-l4", type=NumberRange(0), default=0.0, help="Of a draft worker's."),
    click.option(
        "--seconds", type=NumberRange(1), default=30.0, show_default=True, help="Virtual seconds of each run."
    ),
    click.option(
        "--repeats", type=click.IntRange(1), default=5, show_default=True, help="Runs, for the confidence interval."
    ),
    click.option("--plot", type=_OUT, metavar="FILE", help="Also draw the saving by load, as SVG."),
)


def what_if_options(command: F) -> F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_DEFAULTS: Mapping[str, Any] = {
    "rtt": 0.0,
    "max_draft_tokens": None,
    "mode": "auto",
    "row_price": True,
    "lookups": True,
    "mix": {},
    "price_h100": 1.0,
    "price_l4": 0.0,
    "seconds": 30.0,
    "repeats": 5,
}


def what_if(file: Path, output: str, *, plot: Path | None, **asked: Any) -> int:
    # Imported here: the textbook's figures need no workers.
    from outrider_controller.whatif.forecast import Fleet
    from outrider_controller.whatif.recorded import Recording

    try:
        recording = Recording.read(file)
        if asked["draft"] is not None:
            recording = recording.of(asked["draft"])
        drafts = asked["targets"] if asked["drafts"] is None else asked["drafts"]
        fleet = Fleet(asked["streams"], asked["targets"], drafts)
        question = question_of(recording, asked)
    except ValueError as error:
        raise CommandError(str(error)) from error
    forecast = question.answer(fleet)
    emit("what-if", {"fleet": asdict(fleet), **asdict(forecast)}, output, _table(forecast))
    if plot is not None:
        plot.write_text(_plot(question, fleet))
    return ExitCode.OK


def question_of(recording: Recording, given: Mapping[str, Any]) -> Question:
    """`given`: options by name; the others have their defaults. Raises ValueError."""
    from outrider.drafters import ModelConfig

    from outrider_controller.router.config import PolicyConfig
    from outrider_controller.whatif.forecast import Prices, Question, slower
    from outrider_controller.whatif.recorded import VOCAB_SIZE
    from outrider_controller.whatif.stack import Setup
    from outrider_controller.whatif.texts import ReplayedLookups

    asked = {**_DEFAULTS, **given}
    names = recording.lookups if asked["lookups"] else ()
    cap = asked["max_draft_tokens"]
    setup = Setup(
        slower(recording.times(), asked["rtt"]),
        policy=PolicyConfig() if cap is None else PolicyConfig(max_draft_tokens=cap),
        cap=cap,
        # A recorded guess was right if one of its alternatives was.
        drafting=ModelConfig(num_alternatives=0),
        mode=asked["mode"],
        priced=asked["row_price"],
        sources=lambda texts: [ReplayedLookups(name, texts) for name in names],
    )
    prices: Prices = Prices(asked["price_h100"], asked["price_l4"])
    texts = _mixed(recording.texts(), asked["mix"])
    return Question(texts, VOCAB_SIZE, setup, prices, asked["seconds"], asked["repeats"])


def _mixed(texts: Sequence[Text], mix: Mapping[str, float]) -> Sequence[Text]:
    """In the proportions that are asked for. Raises ValueError for a tenant without requests."""
    if not mix:
        return texts
    of = {tenant: [text for text in texts if text.tenant == tenant] for tenant in mix}
    if unknown := [tenant for tenant, found in of.items() if not found]:
        raise ValueError(f"--mix: no recorded request of {', '.join(unknown)}")
    most = max(len(found) for found in of.values())
    total = max(mix.values()) or 1.0
    return [found[n % len(found)] for tenant, found in of.items() for n in range(round(most * mix[tenant] / total))]


def _table(forecast: Forecast) -> str:
    rows = [
        [name, *(f"{value:.2f}" for value in asdict(figures).values())]
        for name, figures in (("plain", forecast.plain), ("with drafts", forecast.drafted))
    ]
    header = ["", "TOKENS/S", "P50 MS/TOKEN", "P99", "COST/1M TOKENS", "TOKENS/ROUND", "ACCEPTED"]
    saving = f"saving {forecast.saving:.1%} of the cost of a token (90 %: {forecast.low:.1%} to {forecast.high:.1%})"
    return f"{columns(header, rows)}\n\n{saving}"


def _plot(question: Question, fleet: Fleet) -> str:
    rows = []
    for streams in _loads(fleet):
        note(f"computes {streams} streams for the plot")
        found = question.answer(replace(fleet, streams=streams))
        each = {"lower": found.low, "mean": found.saving, "upper": found.high}
        rows.append(Bar(f"{streams} streams", {name: 1 / max(0.05, 1 - value) for name, value in each.items()}))
    return bars("Cost of a token plain, over its cost with drafts (90 % interval)", rows, line=1.0)


def _loads(fleet: Fleet) -> list[int]:
    """From one stream for each target to twice those that were asked about."""
    found = [fleet.targets]
    while found[-1] < 2 * fleet.streams:
        found.append(2 * found[-1])
    return found
