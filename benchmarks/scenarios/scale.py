"""python -m benchmarks scale"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click
from outrider.engine_config import DTYPES
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.models import DEFAULT_TARGET, default_draft
from outrider_controller.cli.output import json_file_option, note

from benchmarks.report import Row, finish, show, table
from benchmarks.support.asking import max_tokens_option
from benchmarks.support.near_ties import Margin, measure_ties, tie, tie_rows
from benchmarks.support.progress import Progress
from benchmarks.support.prompts import Prompt, read_prompts
from benchmarks.support.texts import assembled

if TYPE_CHECKING:
    from outrider.sim.pair import Answered

_REQUIRED = 0.9997
"""Share of the answers that must be equal with and without speculation."""
# Two steps of a bfloat16 logit between 16 and 32.
_NEAR = 0.25
# Prompts that are answered plainly, then with speculation, then written to the checkpoint.
_PART = 256


class Answering(Protocol):
    """The interface of outrider.sim.pair.Pair."""

    def answer(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, speculate: bool, salt: bytes = b""
    ) -> list[Answered]: ...


@dataclass(frozen=True, slots=True)
class Loading:
    """The parameters from which an Answering is loaded."""

    target_model: str
    draft_model: str
    dtype: str
    concurrency: int
    threads: int
    kv_cache_bytes: int | None
    shared_prompts: bool
    """Whether the speculative answer may use the prefix cache of the plain one's prompt."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Prompts of one part: the number of prompts before them, and their token ids."""

    start: int
    prompts: Sequence[list[int]]


AnswerParts = Callable[[Iterable[Asked], int], "Iterator[Part]"]
"""(parts, most tokens of an answer) → results of the parts, in any order."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A prompt whose two answers have different tokens."""

    number: int
    plain: list[int]
    speculative: list[int]


@dataclass(slots=True)
class Part:
    """Some prompts, answered both ways; sums over them."""

    start: int
    """Number of the first prompt."""
    count: int = 0
    tokens: int = 0
    steps: int = 0
    """Steps of the sequences, with speculation."""
    verified: int = 0
    accepted: int = 0
    plain_s: float = 0.0
    speculative_s: float = 0.0
    different: list[Difference] = field(default_factory=list)

    @classmethod
    def of_json(cls, line: str) -> Part:
        fields = json.loads(line)
        different = [Difference(**difference) for difference in fields.pop("different")]
        return cls(**fields, different=different)


@click.command("scale")
@click.option(
    "--prompts",
    "prompts_files",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    multiple=True,
    metavar="FILE",
    help="JSON lines: id, turns or prompt. May be given several times.",
)
@click.option("-n", "--num-prompts", type=click.IntRange(1), default=10_000, show_default=True, help="Distinct texts.")
@click.option("--limit", type=click.IntRange(1), default=None, metavar="N", help="Answer only the first N of them.")
@max_tokens_option(32)
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Of the target.")
@click.option("--target-model", default=DEFAULT_TARGET, show_default=True, metavar="PATH|NAME", help="What answers.")
@click.option("--draft-model", default="", metavar="PATH|NAME", help="Default: the one shipped.")
@click.option("--concurrency", type=click.IntRange(1, 256), default=48, show_default=True, help="Sequences in a step.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of a step.")
@click.option(
    "--shared-prompts", is_flag=True, help="Reads each prompt once: the second answer finds it in the prefix cache."
)
@click.option("--kv-cache-bytes", type=click.IntRange(1), default=None, metavar="N", help="Of each process.")
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="That share the prompts.")
@click.option(
    "--checkpoint",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    metavar="FILE",
    help="Keeps what is done; the same command goes on from there.",
)
@json_file_option
def scale(
    prompts_files: tuple[Path, ...],
    num_prompts: int,
    limit: int | None,
    max_tokens: int,
    dtype: str,
    target_model: str,
    draft_model: str,
    concurrency: int,
    threads: int,
    shared_prompts: bool,
    kv_cache_bytes: int | None,
    processes: int,
    checkpoint: Path | None,
    json_file: Path | None,
) -> int:
    """Thousands of prompts with speculation on and off: are the texts equal?

    Greedy, in this process: the workers' own scheduling, verification and drafting, many sequences to a step, no
    network. Where there are fewer prompts than asked for, their beginnings are prompts of their own. In float32 at
    least 99.97 % must be equal; in bfloat16 each difference must be a near-tie. Every difference is shown with the
    distance of the two tokens' logits.
    """
    wanted = assembled([prompt for file in prompts_files for prompt in read_prompts(file)], num_prompts)
    asked = {"dtype": dtype, "max_tokens": max_tokens, "num_prompts": num_prompts}
    if shared_prompts:
        asked["shared_prompts"] = True
    loading = Loading(target_model, draft_model, dtype, concurrency, threads, kv_cache_bytes, shared_prompts)
    path, revision = _target(target_model)
    encoded = _encoded(path, wanted, max_tokens)
    asked |= {"target": revision, "prompts": hashlib.sha256(json.dumps(encoded).encode()).hexdigest()[:16]}
    answers = (
        answers_of(_load(loading), shared_prompts) if processes == 1 else _answers_of_processes(loading, processes)
    )
    parts = run(answers, encoded[:limit], max_tokens, Checkpoint(checkpoint, asked))
    different = [difference for part in parts for difference in part.different]
    ties = [tie(wanted[one.number].text, one.plain, one.speculative) for one in different]
    gaps = asyncio.run(measure_ties(path, ties))
    result = summary(parts, gaps, dtype)
    near_ties = table(tie_rows([wanted[one.number].id for one in different], ties, gaps)) if ties else ""
    show(table([_row(result)]), near_ties)
    return finish("scale", {**asked, **result, "concurrency": concurrency}, json_file)


def _target(name: str) -> tuple[Path, str]:
    """The target's directory and revision."""
    from outrider.engine import CheckpointError, resolve, weights_revision

    try:
        path = resolve(name, note)
        return path, weights_revision(path)
    except CheckpointError as error:
        raise CommandError(str(error)) from error


def _load(loading: Loading) -> Answering:
    import torch
    from outrider.drafters import load_drafter
    from outrider.engine import CheckpointError, EngineConfig, resolve
    from outrider.engine.loading.loader import load_engine
    from outrider.sim.pair import Pair

    torch.set_num_threads(loading.threads)
    try:
        path = resolve(loading.target_model, note)
        draft = resolve(loading.draft_model or default_draft(loading.target_model), note)
        engine = load_engine(path, EngineConfig(dtype=loading.dtype, kv_cache_bytes=loading.kv_cache_bytes))
        drafter = load_drafter(draft)
    except CheckpointError as error:
        raise CommandError(str(error)) from error
    # All drafts are verified, whatever a row costs on this machine: each is a chance to differ.
    return Pair(engine, drafter, max_sequences=loading.concurrency, row_price=lambda _: 0.0)


def _encoded(path: Path, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
    """Token ids of each prompt as a chat of one turn. Raises CommandError for one that leaves no room for an answer."""
    from outrider.engine.checkpoints.tokenizer import load_tokenizer
    from transformers import AutoConfig

    tokenizer = load_tokenizer(path)
    most = AutoConfig.from_pretrained(path).get_text_config().max_position_embeddings - max_tokens
    encoded = []
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt.text}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        encoded.append(tokenizer.encode(text, add_special_tokens=False))
        if len(encoded[-1]) > most:
            raise CommandError(f"prompt {prompt.id}: {len(encoded[-1])} tokens, at most {most} fit")
    return encoded


class Checkpoint:
    """The finished parts, as lines of JSON after a line with the parameters. Without a file nothing is kept."""

    def __init__(self, file: Path | None, asked: dict[str, Any]) -> None:
        self._file = file
        self._asked = asked

    def read(self) -> list[Part]:
        """Raises CommandError when the file belongs to something else."""
        if self._file is None:
            return []
        if not self._file.exists():
            self._file.write_text(json.dumps(self._asked) + "\n")
            return []
        lines = self._file.read_text().splitlines()
        try:
            asked = json.loads(lines[0])
            parts = [Part.of_json(line) for line in lines[1:]]
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise CommandError(f"{self._file}: not a checkpoint of this command: {error}") from None
        if asked != self._asked:
            other = ", ".join(sorted(name for name in self._asked if asked.get(name) != self._asked[name]))
            raise CommandError(f"{self._file}: was made with another {other}")
        return parts

    def add(self, part: Part) -> None:
        if self._file is not None:
            with self._file.open("a") as stream:
                stream.write(json.dumps(asdict(part)) + "\n")


def run(answers: AnswerParts, prompts: Sequence[list[int]], max_tokens: int, checkpoint: Checkpoint) -> list[Part]:
    """All parts: those in the checkpoint, then the rest."""
    parts = checkpoint.read()
    done = sum(part.count for part in parts)
    report = Progress("prompts", len(prompts))
    report(min(done, len(prompts)), "")
    for part in answers(list(_missing(prompts, parts)), max_tokens):
        parts.append(part)
        checkpoint.add(part)
        done += part.count
        report(done, f"{sum(len(part.different) for part in parts)} different")
    return sorted(parts, key=lambda part: part.start)


def _missing(prompts: Sequence[list[int]], parts: Sequence[Part]) -> Iterator[Asked]:
    at = 0
    for start, count in [*sorted((part.start, part.count) for part in parts), (len(prompts), 0)]:
        for first in range(at, start, _PART):
            yield Asked(first, prompts[first : min(first + _PART, start)])
        at = start + count


def answers_of(pair: Answering, shared_prompts: bool = False) -> AnswerParts:
    """Answers one part after another, in this process."""
    return lambda asked, max_tokens: (_answered(pair, part, max_tokens, shared_prompts) for part in asked)


def _answers_of_processes(loading: Loading, count: int) -> AnswerParts:
    """Answers in processes, each with its own pair; a free process gets the next part."""

    def answer(asked: Iterable[Asked], max_tokens: int) -> Iterator[Part]:
        # Spawned: torch's threads do not survive a fork.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(count, spawn, initializer=_prepare, initargs=(loading,)) as pool:
            for done in as_completed([pool.submit(_answered_there, part, max_tokens) for part in asked]):
                yield done.result()

    return answer


_there: list[tuple[Answering, bool]] = []
"""A spawned process's pair, and whether its answers share their prompts."""


def _prepare(loading: Loading) -> None:
    _there.append((_load(loading), loading.shared_prompts))


def _answered_there(asked: Asked, max_tokens: int) -> Part:
    pair, shared_prompts = _there[0]
    return _answered(pair, asked, max_tokens, shared_prompts)


def _answered(pair: Answering, asked: Asked, max_tokens: int, shared_prompts: bool) -> Part:
    start, prompts = asked.start, asked.prompts
    part = Part(start, len(prompts))
    began_s = time.monotonic()
    # With different salts neither uses prefixes that the other has cached.
    salt = b"speculation" if shared_prompts else b"plain"
    plain = pair.answer(prompts, max_tokens, speculate=False, salt=salt)
    between_s = time.monotonic()
    speculative = pair.answer(prompts, max_tokens, speculate=True, salt=b"speculation")
    part.plain_s, part.speculative_s = round(between_s - began_s, 2), round(time.monotonic() - between_s, 2)
    for number, (a, b) in enumerate(zip(plain, speculative, strict=True), start):
        part.tokens += len(b.token_ids)
        part.steps += b.num_steps
        part.verified += b.num_verified
        part.accepted += b.num_accepted
        if a.token_ids != b.token_ids:
            part.different.append(Difference(number, a.token_ids, b.token_ids))
    return part


def summary(parts: Sequence[Part], gaps: Sequence[Margin], dtype: str) -> dict[str, Any]:
    """The sums, and whether they meet the requirement."""
    count, different = sum(part.count for part in parts), sum(len(part.different) for part in parts)
    verified, steps = sum(part.verified for part in parts), sum(part.steps for part in parts)
    accepted, tokens = sum(part.accepted for part in parts), sum(part.tokens for part in parts)
    share = (count - different) / count
    near = all(gap.float32 <= _NEAR for gap in gaps)
    return {
        "holds": near if dtype == "bfloat16" else share >= _REQUIRED,
        "prompts": count,
        "equal": count - different,
        "share": share,
        "near_ties_only": near,
        "tokens": tokens,
        "acceptance": round(accepted / verified, 4) if verified else 0.0,
        "tokens_per_round": round(tokens / steps, 4) if steps else 0.0,
        "plain_s": round(sum(part.plain_s for part in parts), 1),
        "speculation_s": round(sum(part.speculative_s for part in parts), 1),
        "different": [
            {**asdict(difference), **gap.as_dict()}
            for difference, gap in zip((d for part in parts for d in part.different), gaps, strict=True)
        ],
        "dtype": dtype,
    }


def _row(result: dict[str, Any]) -> Row:
    return {
        "DTYPE": result["dtype"],
        "PROMPTS": result["prompts"],
        "TOKENS": result["tokens"],
        "EQUAL": result["equal"],
        "SHARE": f"{result['share']:.4%}",
        "ACCEPTANCE": f"{result['acceptance']:.3f}",
        "TOKENS/ROUND": f"{result['tokens_per_round']:.2f}",
        "PLAIN S": f"{result['plain_s']:.0f}",
        "SPECULATION S": f"{result['speculation_s']:.0f}",
        "": "holds" if result["holds"] else "DOES NOT HOLD",
    }
