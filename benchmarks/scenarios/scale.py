"""python -m benchmarks scale"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
from benchmarks.support.progress import Progress
from benchmarks.support.prompts import Prompt, read_prompts
from benchmarks.support.texts import assembled

if TYPE_CHECKING:
    from outrider.sim.pair import Answered

# Prompts that are answered plainly, then with speculation, before the next.
_PART = 256


class Answering(Protocol):
    """The interface of outrider.sim.pair.Pair."""

    def answer(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, speculate: bool, salt: bytes = b""
    ) -> list[Answered]: ...


@dataclass(frozen=True, slots=True)
class Difference:
    """A prompt whose two answers have different tokens."""

    number: int
    plain: list[int]
    speculative: list[int]


@dataclass(slots=True)
class Compared:
    """Prompts answered both ways; sums over them."""

    count: int = 0
    tokens: int = 0
    steps: int = 0
    """Steps of the sequences, with speculation."""
    verified: int = 0
    accepted: int = 0
    plain_s: float = 0.0
    speculative_s: float = 0.0
    different: list[Difference] = field(default_factory=list)


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
@max_tokens_option(32)
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Of the target.")
@click.option("--target-model", default=DEFAULT_TARGET, show_default=True, metavar="PATH|NAME", help="What answers.")
@click.option("--draft-model", default="", metavar="PATH|NAME", help="Default: the one shipped.")
@click.option("--concurrency", type=click.IntRange(1, 256), default=48, show_default=True, help="Sequences in a step.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of a step.")
@json_file_option
def scale(
    prompts_files: tuple[Path, ...],
    num_prompts: int,
    max_tokens: int,
    dtype: str,
    target_model: str,
    draft_model: str,
    concurrency: int,
    threads: int,
    json_file: Path | None,
) -> int:
    """Thousands of prompts with speculation on and off: are the texts equal?

    Greedy, in this process: the workers' own scheduling, verification and drafting, many sequences to a step, no
    network. Where there are fewer prompts than asked for, their beginnings are prompts of their own.
    """
    wanted = assembled([prompt for file in prompts_files for prompt in read_prompts(file)], num_prompts)
    asked = {"dtype": dtype, "max_tokens": max_tokens, "num_prompts": num_prompts}
    path, revision = _target(target_model)
    asked |= {"target": revision}
    pair = _load(path, draft_model or default_draft(target_model), dtype, concurrency, threads)
    result = summary(run(pair, _encoded(path, wanted, max_tokens), max_tokens))
    different = ", ".join(wanted[one["number"]].id for one in result["different"])
    show(table([_row(dtype, result)]), f"different: {different}" if different else "")
    return finish("scale", {**asked, **result, "concurrency": concurrency}, json_file)


def _target(name: str) -> tuple[Path, str]:
    """The target's directory and revision."""
    from outrider.engine import CheckpointError, resolve, weights_revision

    try:
        path = resolve(name, note)
        return path, weights_revision(path)
    except CheckpointError as error:
        raise CommandError(str(error)) from error


def _load(target: Path, draft_model: str, dtype: str, concurrency: int, threads: int) -> Answering:
    import torch
    from outrider.drafters import load_drafter
    from outrider.engine import CheckpointError, EngineConfig, resolve
    from outrider.engine.loading.loader import load_engine
    from outrider.sim.pair import Pair

    torch.set_num_threads(threads)
    try:
        draft = resolve(draft_model, note)
        engine, drafter = load_engine(target, EngineConfig(dtype=dtype)), load_drafter(draft)
    except CheckpointError as error:
        raise CommandError(str(error)) from error
    # All drafts are verified, whatever a row costs on this machine: each is a chance to differ.
    return Pair(engine, drafter, max_sequences=concurrency, row_price=lambda _: 0.0)


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


def run(pair: Answering, prompts: Sequence[list[int]], max_tokens: int) -> Compared:
    """All prompts, some at a time: plainly, then with speculation."""
    done, report = Compared(), Progress("prompts", len(prompts))
    for start in range(0, len(prompts), _PART):
        report(start, f"{len(done.different)} different")
        _add(done, pair, prompts[start : start + _PART], max_tokens)
    report(len(prompts), f"{len(done.different)} different")
    return done


def _add(done: Compared, pair: Answering, prompts: Sequence[list[int]], max_tokens: int) -> None:
    began_s = time.monotonic()
    # With different salts neither uses prefixes that the other has cached.
    plain = pair.answer(prompts, max_tokens, speculate=False, salt=b"plain")
    between_s = time.monotonic()
    speculative = pair.answer(prompts, max_tokens, speculate=True, salt=b"speculation")
    done.plain_s += between_s - began_s
    done.speculative_s += time.monotonic() - between_s
    for number, (a, b) in enumerate(zip(plain, speculative, strict=True), done.count):
        done.tokens += len(b.token_ids)
        done.steps += b.num_steps
        done.verified += b.num_verified
        done.accepted += b.num_accepted
        if a.token_ids != b.token_ids:
            done.different.append(Difference(number, a.token_ids, b.token_ids))
    done.count += len(prompts)


def summary(compared: Compared) -> dict[str, Any]:
    """The sums, and whether all texts are equal."""
    return {
        "holds": not compared.different,
        "prompts": compared.count,
        "equal": compared.count - len(compared.different),
        "tokens": compared.tokens,
        "acceptance": round(compared.accepted / compared.verified, 4) if compared.verified else 0.0,
        "tokens_per_round": round(compared.tokens / compared.steps, 4) if compared.steps else 0.0,
        "plain_s": round(compared.plain_s, 1),
        "speculation_s": round(compared.speculative_s, 1),
        "different": [asdict(difference) for difference in compared.different],
    }


def _row(dtype: str, result: dict[str, Any]) -> Row:
    return {
        "DTYPE": dtype,
        "PROMPTS": result["prompts"],
        "TOKENS": result["tokens"],
        "EQUAL": result["equal"],
        "ACCEPTANCE": f"{result['acceptance']:.3f}",
        "TOKENS/ROUND": f"{result['tokens_per_round']:.2f}",
        "PLAIN S": f"{result['plain_s']:.0f}",
        "SPECULATION S": f"{result['speculation_s']:.0f}",
        "": "holds" if result["holds"] else "DOES NOT HOLD",
    }
