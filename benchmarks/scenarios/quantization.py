"""python -m benchmarks quantization"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click
from outrider.engine_config import QUANTIZATIONS
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.models import DEFAULT_TARGET, default_draft

from benchmarks.arms import turns
from benchmarks.report import Row, finish, show, table
from benchmarks.support.asking import count_option, max_tokens_option
from benchmarks.support.progress import Progress
from benchmarks.support.prompts import prompts_option, read_prompts, spread

if TYPE_CHECKING:
    from outrider.engine import Engine, EngineSequence

_POSITIONS = 5
_CONTEXT = 200


@dataclass(frozen=True, slots=True)
class Speed:
    """Milliseconds of steps, by round."""

    one: list[float]
    several: list[float]
    """Steps of five positions."""

    @property
    def ratio(self) -> float:
        """Median of several over one, within the same rounds."""
        return median(b / a for a, b in zip(self.one, self.several, strict=True))


@dataclass(frozen=True, slots=True)
class Measured:
    """One model in one quantization."""

    role: str
    quantization: str
    weight_bytes: int
    load_s: float
    step_ms: float
    step_median_ms: float
    verify_ratio: float
    acceptance: float
    """With the other model unquantized."""
    tokens_per_round: float
    agreement: float
    """Share of positions, in the plain target's own answers, with the plain model's likeliest token."""


@click.command("quantization")
@prompts_option
@count_option(24)
@max_tokens_option(48)
@click.option(
    "--quantization",
    "methods",
    type=click.Choice(QUANTIZATIONS[1:]),
    multiple=True,
    default=("int8", "int4"),
    show_default=True,
    help="Against none.",
)
@click.option("--target-model", default=DEFAULT_TARGET, show_default=True, metavar="PATH|NAME")
@click.option("--draft-model", default="", metavar="PATH|NAME", help="Default: the one shipped.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of what is not quantized.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--rounds", type=click.IntRange(3), default=12, show_default=True, help="Timed steps of each.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of a step.")
@json_file_option
def quantization(
    prompts_file: Path,
    num_prompts: int,
    max_tokens: int,
    methods: tuple[str, ...],
    target_model: str,
    draft_model: str,
    dtype: str,
    device: str,
    rounds: int,
    threads: int,
    json_file: Path | None,
) -> int:
    """What do fewer bits cost and save, in the target and in the draft?

    Memory of the weights, time of a step and of verifying five positions (in turns, in this process), acceptance
    greedily with the other model unquantized, and how often the likeliest token stays the same.
    """
    wanted = ("none", *dict.fromkeys(methods))
    texts = [prompt.text for prompt in spread(read_prompts(prompts_file), num_prompts)]
    draft = draft_model or default_draft(target_model)
    measured = _measure(target_model, draft, texts, wanted, max_tokens, rounds, threads, dtype, device)
    plain = {one.role: one for one in measured if one.quantization == "none"}
    show(table([_row(one, plain[one.role]) for one in measured]))
    about = {"num_prompts": len(texts), "max_tokens": max_tokens, "dtype": dtype, "device": device}
    return finish("quantization", {**about, "measured": [asdict(one) for one in measured]}, json_file)


def _measure(
    target_model: str,
    draft_model: str,
    texts: Sequence[str],
    wanted: Sequence[str],
    max_tokens: int,
    rounds: int,
    threads: int,
    dtype: str,
    device: str,
) -> list[Measured]:
    import torch
    from outrider.engine import CheckpointError, EngineConfig, resolve

    torch.set_num_threads(threads)
    configs = {how: EngineConfig(dtype=dtype, device=device, quantization=how, num_blocks=1024) for how in wanted}
    try:
        target, draft = resolve(target_model, note), resolve(draft_model, note)
        targets, drafts = _load(target, configs, "target"), _load(draft, configs, "draft")
    except CheckpointError as error:
        raise CommandError(str(error)) from error
    prompts = _encoded(target, texts)
    speeds = {"target": _speeds(targets, prompts, rounds), "draft": _speeds(drafts, prompts, rounds)}
    pairs = {("target", how): (how, "none") for how in wanted} | {("draft", how): ("none", how) for how in wanted}
    answers: dict[tuple[str, str], Any] = {}
    report = Progress("pairs", 2 * len(wanted) - 1)
    for pair in dict.fromkeys(pairs.values()):
        # A salt per pair, so that no pair uses prefixes that another has cached.
        salt = "/".join(pair).encode()
        answers[pair] = _answers(targets[pair[0]][0], drafts[pair[1]][0], prompts, max_tokens, salt)
        report(len(answers), "")
    plain = [answer.token_ids for answer in answers["none", "none"]]
    found = []
    for (role, how), pair in pairs.items():
        models = targets if role == "target" else drafts
        engine, load_s = models[how]
        speed, sums = speeds[role][how], answers[pair]
        found.append(
            Measured(
                role,
                how,
                engine.weight_bytes,
                round(load_s, 2),
                round(min(speed.one), 3),
                round(median(speed.one), 3),
                round(speed.ratio, 4),
                _share(sum(a.num_accepted for a in sums), sum(a.num_verified for a in sums)),
                _share(sum(len(a.token_ids) for a in sums), sum(a.num_steps for a in sums)),
                agreement(_argmax_ids(models["none"][0], prompts, plain), _argmax_ids(engine, prompts, plain)),
            )
        )
    return found


def _load(path: Path, configs: Mapping[str, Any], role: str) -> dict[str, tuple[Engine, float]]:
    """Engines by name, each with its load time in seconds."""
    from outrider.engine.models.loader import load_engine

    found = {}
    for how, config in configs.items():
        note(f"loading the {role}, {how}")
        started_s = time.monotonic()
        found[how] = load_engine(path, config), time.monotonic() - started_s
    return found


def _encoded(path: Path, texts: Sequence[str]) -> list[list[int]]:
    from outrider.engine.checkpoints.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    chats = [[{"role": "user", "content": text}] for text in texts]
    whole = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return [tokenizer.encode(text, add_special_tokens=False) for text in whole]


def _speeds(
    models: Mapping[str, tuple[Engine, float]], prompts: Sequence[Sequence[int]], rounds: int
) -> dict[str, Speed]:
    """Measures the engines in turns, after the same context."""
    joined = [token for prompt in prompts for token in prompt]
    some = (joined * (1 + (_CONTEXT + _POSITIONS) // len(joined)))[: _CONTEXT + _POSITIONS]
    speeds = {how: Speed([], []) for how in models}
    opened = {how: _opened(engine, some) for how, (engine, _) in models.items()}
    for number, how in turns(rounds + 1, list(models)):
        engine = models[how][0]
        one = _step_ms(engine, opened[how], some[_CONTEXT:][:1])
        several = _step_ms(engine, opened[how], some[_CONTEXT:])
        # Without the first round, which includes one-time work for each shape.
        if number:
            speeds[how].one.append(one)
            speeds[how].several.append(several)
    for how, (engine, _) in models.items():
        engine.kv.close(opened[how])
    return speeds


def _opened(engine: Engine, tokens: Sequence[int]) -> EngineSequence:
    from outrider.engine import Row

    sequence = engine.kv.open([])
    engine.forward([Row(sequence, tokens[:_CONTEXT], 0)])
    return sequence


def _step_ms(engine: Engine, sequence: EngineSequence, tokens: Sequence[int]) -> float:
    from outrider.engine import Row

    length = sequence.cached_len
    started_s = time.perf_counter()
    engine.forward([Row(sequence, tokens, len(tokens))]).argmax(-1).tolist()
    taken_ms = (time.perf_counter() - started_s) * 1e3
    engine.kv.rewind(sequence, length)
    return taken_ms


def _answers(
    target: Engine, draft: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, salt: bytes
) -> list[Any]:
    from outrider.drafters import ModelDrafter
    from outrider.local import Pair

    pair = Pair(target, ModelDrafter(draft), max_sequences=16)
    return pair.answer(prompts, max_tokens, speculate=True, salt=salt)


def _argmax_ids(engine: Engine, prompts: Sequence[Sequence[int]], answered: Sequence[Sequence[int]]) -> list[int]:
    """The model's likeliest token at every position of the answers."""
    from outrider.engine import Row

    found: list[int] = []
    for prompt, answer in zip(prompts, answered, strict=True):
        tokens = [*prompt, *answer[:-1]]
        sequence = engine.kv.open([])
        found += engine.forward([Row(sequence, tokens, len(answer))]).argmax(-1).tolist()
        engine.kv.close(sequence)
    return found


def agreement(first: Sequence[int], second: Sequence[int]) -> float:
    """Share of the positions at which both are the same."""
    return _share(sum(a == b for a, b in zip(first, second, strict=True)), len(first))


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


def _row(one: Measured, plain: Measured) -> Row:
    return {
        "MODEL": one.role,
        "WEIGHTS": one.quantization,
        "MB": f"{one.weight_bytes / 1e6:.1f}",
        "LOAD S": f"{one.load_s:.1f}",
        "STEP MS": f"{one.step_ms:.2f}",
        "MEDIAN": f"{one.step_median_ms:.2f}",
        "× PLAIN": f"{one.step_ms / plain.step_ms:.2f}",
        "VERIFY 5/1": f"{one.verify_ratio:.2f}",
        "ACCEPTANCE": f"{one.acceptance:.3f}",
        "LOST": f"{plain.acceptance - one.acceptance:.3f}",
        "TOKENS/ROUND": f"{one.tokens_per_round:.2f}",
        "SAME FAVOURITE": f"{one.agreement:.4f}",
    }
