"""python -m benchmarks gpu-pairs"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from outrider.drafters import ModelConfig
from outrider.drafting.source import make_sources
from outrider_controller.cli.models import DEFAULT_TARGET
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.router.config import PolicyConfig
from outrider_controller.whatif.stack import RunResult, Setup, Times, VirtualStack
from outrider_controller.whatif.texts import Texts

from benchmarks.report import finish, show, table
from benchmarks.support.asking import count_option, max_tokens_option
from benchmarks.support.known_texts import corrected, known_texts
from benchmarks.support.machines import (
    EAGLE_HEAD,
    H100,
    H200,
    L4,
    L40S,
    LLAMA_1B,
    LLAMA_1B_INT8,
    LLAMA_8B,
    LLAMA_70B,
    QWEN_06B,
    QWEN_32B,
    Machine,
)
from benchmarks.support.prompts import prompts_option, read_prompts, spread

_DRAFT = "smollm2-135m-draft"
# The host, between two steps of a target; and a message between two machines of one rack.
_BETWEEN_STEPS_S, _ONE_WAY_S = 0.0003, 0.0001
_TOKENS = 1500
"""That a stream decodes in a run."""


@dataclass(frozen=True, slots=True)
class GpuPair:
    """A target, and a draft worker with a device of its own."""

    name: str
    target: Machine
    draft: Machine

    def times(self, added_s: float) -> Times:
        return Times(
            target=self.target.step_s,
            # A forward of one token for each sequence.
            draft=lambda sequences, rows, tokens: self.draft.step_s(sequences, sequences, tokens),
            one_way_s=_ONE_WAY_S + added_s / 2,
            between_steps_s=_BETWEEN_STEPS_S,
            num_free=self.target.num_free,
        )


PAIRS = (
    GpuPair("70B on 4 H100 + 1B on L4", Machine(LLAMA_70B, H100, 4), Machine(LLAMA_1B, L4)),
    GpuPair("70B on 8 H100 + 1B on H100", Machine(LLAMA_70B, H100, 8), Machine(LLAMA_1B, H100)),
    GpuPair("70B on 8 H100 + 1B on L40S", Machine(LLAMA_70B, H100, 8), Machine(LLAMA_1B, L40S)),
    GpuPair("70B on 8 H100 + 1B in int8 on L4", Machine(LLAMA_70B, H100, 8), Machine(LLAMA_1B_INT8, L4)),
    GpuPair("8B on H100 + its head on H100", Machine(LLAMA_8B, H100), Machine(EAGLE_HEAD, H100)),
    GpuPair("32B on H200 + 0.6B on L4", Machine(QWEN_32B, H200), Machine(QWEN_06B, L4)),
)


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to draft."""

    name: str
    max_wait_us: int = 50_000
    num_alternatives: int = 0
    lookups: Sequence[str] = ()
    drafts: int = 1
    mode: str = "auto"

    def setup(self, pair: GpuPair, added_s: float, streams: int) -> Setup:
        return Setup(
            replace(pair.times(added_s)),
            streams=streams,
            drafts=self.drafts,
            policy=PolicyConfig(max_wait_us=self.max_wait_us),
            drafting=ModelConfig(num_alternatives=self.num_alternatives),
            mode=self.mode,
            sources=lambda texts: make_sources(self.lookups),
        )


PLAIN = Arm("plain", mode="off")
ARMS = (
    Arm("drafts"),
    Arm("without waiting", max_wait_us=0),
    Arm("without waiting, and lookups", max_wait_us=0, lookups=("ngram",)),
    Arm("and trees", num_alternatives=4),
    Arm("and lookups", lookups=("ngram",)),
    Arm("lookups alone", drafts=0, lookups=("ngram",)),
    Arm("all", num_alternatives=4, lookups=("ngram",)),
)


@dataclass(slots=True)
class Found:
    pair: str
    streams: int
    added_ms: float
    plain_tokens_per_s: float
    times_plain: dict[str, float] = field(default_factory=dict)


@click.command("gpu-pairs")
@prompts_option
@count_option(24)
@max_tokens_option(128)
@click.option("--added-ms", multiple=True, type=float, default=(0.0, 2.0, 5.0, 10.0, 20.0), show_default=True)
@click.option("--streams", multiple=True, type=click.IntRange(1), default=(1, 8), show_default=True)
@click.option("--acceptance", type=click.FloatRange(0, 1), help="Of a first guess; some wrong ones are made right.")
@json_file_option
def gpu_pairs(
    prompts_file: Path,
    num_prompts: int,
    max_tokens: int,
    added_ms: tuple[float, ...],
    streams: tuple[int, ...],
    acceptance: float | None,
    json_file: Path | None,
) -> int:
    """What would waiting, trees and lookups be worth on GPUs?

    Computed: the shipped workers, router policy and plan in virtual time. Steps and forwards take what weight bytes,
    bandwidth and arithmetic of data sheets say. Texts and guesses are those of the shipped pair, read from its models,
    so acceptance is that of SmolLM2 and not of the pair that is named; --acceptance raises it.
    """
    texts = known_texts(DEFAULT_TARGET, _DRAFT, spread(read_prompts(prompts_file), num_prompts), max_tokens)
    if acceptance is not None:
        texts = corrected(texts, acceptance)
    found = [_found(texts, pair, count, added) for pair in PAIRS for count in streams for added in added_ms]
    show(table([_row(one) for one in found]))
    return finish("gpu-pairs", {"found": [asdict(one) for one in found]}, json_file)


def _found(texts: Texts, pair: GpuPair, streams: int, added_ms: float) -> Found:
    note(f"computes {pair.name}, {streams} streams, {added_ms:g} ms")
    # As long as plain decoding takes for so many tokens.
    seconds = _TOKENS * pair.target.step_s(streams, streams)
    rates = {
        arm.name: _run(texts, arm.setup(pair, added_ms / 1e3, streams), seconds).tokens_per_s for arm in (PLAIN, *ARMS)
    }
    plain = rates.pop(PLAIN.name)
    return Found(
        pair.name, streams, added_ms, round(plain, 1), {name: round(rate / plain, 3) for name, rate in rates.items()}
    )


def _run(texts: Texts, setup: Setup, seconds: float) -> RunResult:
    return VirtualStack(texts, setup).run(seconds, seconds / 4)


def _row(found: Found) -> dict[str, Any]:
    return {
        "PAIR": found.pair,
        "STREAMS": found.streams,
        "ADDED MS": f"{found.added_ms:g}",
        "PLAIN TOKENS/S": found.plain_tokens_per_s,
        **{name.upper(): f"{value:.2f}" for name, value in found.times_plain.items()},
    }
