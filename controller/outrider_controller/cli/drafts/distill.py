"""outrider distill"""

from __future__ import annotations

import _thread
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import quote

import click
from outrider.samples import Cipher, SampleStore, read_cipher
from outrider.user_cache import cache_directory

from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.models import DEFAULT_TARGET, shipped_draft
from outrider_controller.cli.output import columns, json_file_option, note, write_json

if TYPE_CHECKING:
    from outrider.training.corpus import CorpusConfig
    from outrider.training.distill import DistillConfig, DistillReport
    from outrider.training.head_student import LearnableHead
    from outrider.training.texts import AnsweredText, Message, Sampled


_WATCH_S = 1.0
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("distill")
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--target-model", default=DEFAULT_TARGET, show_default=True, metavar="PATH|NAME", help="The teacher.")
@click.option("--kind", type=click.Choice(["model", "mtp", "eagle3", "medusa"]), default="model", show_default=True)
@click.option("--student", default="", metavar="PATH|NAME", help="Model that learns, with the target's tokenizer.")
@click.option(
    "--start", default="", metavar="PATH|NAME", help="Draft or MTP head to start from; for kinds model and mtp."
)
@click.option(
    "--adapter",
    type=click.IntRange(1, 256),
    default=None,
    metavar="RANK",
    help="Make a low-rank adapter of --start instead of a draft of its own; for kind model.",
)
@click.option(
    "--corpus-tokens",
    type=click.IntRange(1000),
    default=None,
    metavar="N",
    help="Tokens that the target writes for training.",
)
@click.option(
    "--train-tokens",
    type=click.IntRange(1),
    default=None,
    metavar="N",
    help="Tokens to learn from, all passes counted.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    default=None,
    metavar="N",
    help="Writing ends after half of them, learning after the other half; then the draft is measured.",
)
@click.option("--layers", default=None, metavar="I,J,..", help="The target's layers to start from; -1 is its last.")
@click.option(
    "--taps",
    default="",
    metavar="I,J,..",
    help="Layers of the target whose states the head reads; for kinds mtp and eagle3.",
)
@click.option("--head-tokens", type=click.IntRange(1), default=None, metavar="N", help="Output vocabulary.")
@click.option(
    "--prompts", type=_FILE, default=None, metavar="FILE", help="JSON lines: prompts that the target answers."
)
@click.option("--samples", type=_FILE, default=None, metavar="FILE", help="JSON lines: prompts with answers to learn.")
@click.option("--from-samples", "tenant", default="", metavar="TENANT", help="Recorded requests of this tenant.")
@click.option(
    "--samples-dir", type=_DIRECTORY, default=None, metavar="DIR", help="Their directory: the targets' --samples."
)
@click.option("--samples-key-file", type=_FILE, default=None, metavar="FILE", help="The targets' option of this name.")
@click.option("--device", default="cpu", show_default=True, metavar="DEVICE", help="A torch device: cpu, cuda.")
@click.option("--threads", type=click.IntRange(0), default=0, metavar="N", help="Of torch; 0: its default.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--work-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="For the corpus, from which a second run continues. Default: in ~/.cache/outrider/distill.",
)
@json_file_option
def distill(out: Path, json_file: Path | None, **given: Any) -> int:
    """Make a draft for a target, and write it to OUT.

    The target writes conversations, user's part included, from short and long openings of many kinds; with
    --prompts it answers yours, and with --samples it reads answers that exist. With --from-samples it reads
    requests of a tenant that targets have recorded; corpus and draft then lie beside them, encrypted alike and
    erased with them, and OUT is a link to the draft, which is not encrypted. A student of a few of its layers then
    learns the target's full distribution over them. The target then answers prompts that were kept back, and its
    verifier counts what it accepts of the draft, and of the draft that it began as, or else of that which is
    shipped for the target, at temperatures 0 and 0.8. Hours on two cores with the defaults; --corpus-tokens and
    --train-tokens say how many. A line on stderr every 30 s says how much is done, and how long the rest will take.
    Ctrl-C keeps the corpus and what was learned, and the same command goes on from there.
    """
    from outrider.engine import CheckpointError
    from outrider.training.distill import run

    try:
        with _reading(given["samples_dir"], given["tenant"]):
            config = _config(out, SimpleNamespace(**given))
            note(_plan(config))
            try:
                with TimeLeft() as progress:
                    result = run(config, progress)
            except KeyboardInterrupt:
                raise CommandError(_kept(config), ExitCode.INTERRUPTED) from None
    except (CheckpointError, ValueError) as error:
        raise CommandError(str(error)) from error
    click.echo(measured(config, result))
    use = f"--draft-model {out}" if config.kind == "model" else f'--drafts 0 --target-args "--head {out}"'
    if config.adapter:
        use = f'--draft-args "--adapters {out}"'
    target = "" if config.target == DEFAULT_TARGET else f"--target-model {config.target} "
    click.echo(f"\n{out} holds the draft: outrider up {target}{use}")
    write_json(json_file, "distill", asdict(result))
    return ExitCode.OK


@contextmanager
def _reading(samples: Path | None, tenant: str) -> Iterator[None]:
    """Ends the block when the tenant's samples are ordered to be erased. The erasure is complete only after that. What
    the block writes is its owner's alone."""
    if samples is None or not tenant:
        yield
        return
    store, ended = SampleStore(samples), threading.Event()
    before_us, mask = store.erased_us(tenant), os.umask(0o077)

    def watch() -> None:
        while not ended.wait(_WATCH_S):
            if store.erased_us(tenant) > before_us:
                _thread.interrupt_main(signal.SIGUSR1)
                return

    watching = threading.Thread(target=watch, name="erasures", daemon=True)
    if threading.current_thread() is threading.main_thread():
        # Not SIGINT: what a script starts in the background ignores it.
        signal.signal(signal.SIGUSR1, signal.default_int_handler)
    with store.reading(tenant):
        watching.start()
        try:
            yield
        except (CommandError, OSError, ValueError):
            if store.erased_us(tenant) > before_us:
                message = f"the samples of {tenant} are erased, and the corpus that was made of them"
                raise CommandError(message, ExitCode.NOT_FOUND, reason="ERASED") from None
            raise
        finally:
            ended.set()
            watching.join()
            os.umask(mask)


def measured(config: DistillConfig, result: DistillReport) -> str:
    """Of the new draft and of the one in use; and what it took."""
    drafts = [[str(config.out), result.acceptance, result.acceptance_sampled]]
    if result.acceptance_in_use is not None:
        drafts.append([config.in_use, result.acceptance_in_use, result.acceptance_in_use_sampled])
    header = ["ACCEPTED OF FIRST DRAFTED TOKENS", "TEMPERATURE 0", "TEMPERATURE 0.8"]
    others = [[name.replace("_", " "), n] for name, n in asdict(result).items() if not name.startswith("acceptance")]
    return f"{columns(header, drafts)}\n\n{columns(['MEASURED', ''], others)}"


def _config(out: Path, given: SimpleNamespace) -> DistillConfig:
    """Of the command's options. Raises UsageError, ValueError."""
    from outrider.engine.checkpoints.fetching import directory
    from outrider.training.corpus import CorpusConfig
    from outrider.training.distill import DistillConfig, conversations_at_once
    from outrider.training.head_student import KINDS, taps_of_start

    head = KINDS.get(given.kind)
    _check_heeded(head, given.start or given.student, given.layers, given.head_tokens)
    if head is not None and head.starts and given.start and not given.taps:
        given.taps = ",".join(map(str, taps_of_start(directory(given.start))))
    _check_origins((given.start, given.student), given.tenant)
    prompts, answers, cipher, work = _texts(out, given)
    config = DistillConfig(
        out=out,
        work=work,
        target=given.target_model,
        kind=given.kind,
        student_model=given.student,
        start=given.start,
        adapter=given.adapter or 0,
        in_use=given.start or shipped_draft(given.target_model),
        device=given.device,
        threads=given.threads,
        seed=given.seed,
        samples_of=given.tenant,
        cipher=cipher,
        corpus=CorpusConfig(prompts=tuple(prompts), samples=tuple(answers), seed=given.seed),
    )
    training, corpus, student = config.training, config.corpus, config.student
    half_s = 30 * (given.minutes or 0.0)
    at_once = conversations_at_once(given.device)
    return replace(
        config,
        training=replace(
            training, seed=given.seed, train_tokens=given.train_tokens or training.train_tokens, seconds=half_s
        ),
        corpus=replace(corpus, tokens=given.corpus_tokens or corpus.tokens, concurrency=at_once, seconds=half_s),
        student=replace(
            student,
            layers=student.layers if given.layers is None else _numbers("--layers", given.layers),
            taps=_numbers("--taps", given.taps) if given.taps else (),
            head_tokens=given.head_tokens or student.head_tokens,
        ),
    )


class _Texts(NamedTuple):
    """What is learnt, and where its corpus is kept."""

    prompts: Sequence[tuple[Message, ...]]
    answers: Sequence[AnsweredText | Sampled]
    cipher: Cipher | None
    work: Path


def _texts(out: Path, given: SimpleNamespace) -> _Texts:
    """Raises UsageError, ValueError. Of a tenant's samples, all that is made of them lies beside them."""
    from outrider.training.texts import read_prompts, read_recorded, read_samples

    if sum(map(bool, (given.prompts, given.samples, given.tenant))) > 1:
        raise click.UsageError("give one of --prompts, --samples and --from-samples")
    if bool(given.tenant) is not bool(given.samples_dir):
        raise click.UsageError("--from-samples and --samples-dir belong together")
    states = _states(given.kind, given.taps)
    cipher = read_cipher(given.samples_key_file) if given.samples_key_file else None
    if given.samples_dir is None:
        work = given.work_dir or _work(given.target_model, states, given.prompts or given.samples)
        prompts = read_prompts(given.prompts) if given.prompts else ()
        return _Texts(prompts, read_samples(given.samples) if given.samples else (), cipher, work)
    store = SampleStore(given.samples_dir, cipher)
    answers = read_recorded(store, given.tenant)
    for path in filter(None, (out, given.work_dir)):
        _lies_with(store, given.tenant, path)
    work = given.work_dir or store.work(given.tenant, f"distill{states or f'-{given.kind}'}")
    return _Texts((), answers, cipher, work)


def _lies_with(store: SampleStore, tenant: str, path: Path) -> None:
    """Makes `path` a link to a directory beside the tenant's samples, so that an erasure removes what is in it too.
    Raises UsageError."""
    if path.exists():
        if path.resolve().is_relative_to(store.of(tenant).resolve()):
            return
        if path.is_symlink() or not path.is_dir() or any(path.iterdir()):
            raise click.UsageError(f"{path} exists; with --from-samples it would be a link to where an erasure looks")
        path.rmdir()
    # To what was erased.
    path.unlink(missing_ok=True)
    number = hashlib.sha256(bytes(path.absolute())).hexdigest()[:8]
    place = store.work(tenant, f"made-{number}").absolute() / path.name
    place.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(place)


def _check_origins(starts: Sequence[str], tenant: str) -> None:
    """What begins as a draft that a tenant's samples made has learnt from them too. Raises ValueError."""
    from outrider.engine.checkpoints.fetching import directory

    for start in filter(None, starts):
        recipe = directory(start) / "recipe.json"
        of = json.loads(recipe.read_text()).get("config", {}).get("samples_of", "") if recipe.is_file() else ""
        if of not in ("", tenant):
            raise ValueError(f"{start} is made of samples of {of}, and what begins as it would outlast their erasure")


def _check_heeded(head: LearnableHead | None, begins_as: str, layers: str | None, head_tokens: int | None) -> None:
    """Raises UsageError for an option of which the student would take no notice."""
    for option, value in (("--layers", layers), ("--head-tokens", head_tokens)):
        if value is not None and begins_as:
            raise click.UsageError(f"{option}: not with --start or --student, which have their own")
    if layers is not None and head is not None and not head.starts:
        raise click.UsageError("--layers: only for kinds model and mtp")


def _states(kind: str, taps: str) -> str:
    """Names the states that a corpus keeps beside the inputs of the target's vocabulary head."""
    from outrider.training.head_student import KINDS

    if taps:
        return f"-taps-{taps.replace(',', '-')}"
    return f"-{kind}" if kind in KINDS and KINDS[kind].default_taps is not None else ""


def _work(target: str, states: str, texts: Path | None) -> Path:
    """A path or an address becomes one name: the corpus does not belong into the target's own directory. Each file of
    texts has a corpus of its own, and so have heads that read more of the target's states."""
    name = quote(target, safe="") + states
    if texts is not None:
        name += f"-{texts.stem}-{hashlib.sha256(texts.read_bytes()).hexdigest()[:8]}"
    return cache_directory() / "distill" / name


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.UsageError(f"{option}: {text!r} is not a list of numbers") from None


def _plan(config: DistillConfig) -> str:
    """The first line: what, where, how long, and that it can be interrupted."""
    from outrider.training.shards import stored_tokens

    there = stored_tokens(config.work, config.cipher)
    before = f" ({there:,} are there from an earlier run)" if there else ""
    return (
        f"{config.target} {_writes(config.corpus)} into {config.work}{before}; a student learns "
        f"{config.training.train_tokens:,} tokens, and becomes the draft in {config.out}. With the defaults that takes "
        "hours on two cores; a line every 30 s says how long the rest will take. Ctrl-C keeps what is done; the same "
        "command goes on from there."
    )


def _writes(corpus: CorpusConfig) -> str:
    if corpus.samples:
        return f"reads {len(corpus.samples):,} answers, at most {corpus.tokens:,} tokens,"
    if corpus.prompts:
        return f"answers {len(corpus.prompts):,} prompts up to four times, in at most {corpus.tokens:,} tokens,"
    return f"writes {corpus.tokens:,} tokens"


def _kept(config: DistillConfig) -> str:
    from outrider.training.shards import stored_tokens

    kept = stored_tokens(config.work, config.cipher)
    return (
        f"interrupted; {kept:,} of {config.corpus.tokens:,} tokens of the corpus are kept in {config.work}, and the "
        "same command goes on from them, and from what was learned"
    )


INTERVAL_S = 30.0


class TimeLeft:
    """Call it with what is done, as often as you like. While it is open, a thread writes, even when nobody calls."""

    def __init__(
        self,
        write: Callable[[str], None] = note,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._write, self._clock, self._interval_s = write, clock, interval_s
        self._stage, self._first, self._began_s = "", 0, clock()
        self._said, self._said_s = (0, 0, ""), self._began_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="time left", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def __call__(self, stage: str, done: int, total: int, text: str) -> None:
        """`done` of `total` tokens of a stage. One stage comes after another."""
        self._said, self._said_s = (done, total, text), self._clock()
        if stage != self._stage:
            self._stage, self._first, self._began_s = stage, done, self._said_s

    def line(self) -> str:
        now_s, (done, total, text) = self._clock(), self._said
        if not self._stage:
            return f"starting, for {span(now_s - self._began_s)} now"
        # What was done when this run began with a stage is no sign of this run's speed; nor is a speed that has ended.
        fresh, passed_s, silent_s = done - self._first, self._said_s - self._began_s, now_s - self._said_s
        left_s = (total - done) * passed_s / fresh - silent_s if fresh > 0 else 0.0
        known = silent_s <= passed_s and (left_s > 0 or done == total)
        left = f"about {span(max(left_s, 0.0))} left" if fresh > 0 and known else "time left not known"
        said = f"{self._stage}: {100 * done // max(total, 1)} % ({done:,} of {total:,} tokens), {left}"
        return f"{said}; {text}" if text else said

    def _tick(self) -> None:
        while not self._closed.wait(self._interval_s):
            self._write(self.line())


def span(seconds: float) -> str:
    """As people say it: 40 s, 14 min, 2 h 10 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
