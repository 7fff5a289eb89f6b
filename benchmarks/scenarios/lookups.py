"""python -m benchmarks lookups"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from outrider.drafting.lookup import NAMES
from outrider.drafting.source import make_sources
from outrider.drafting.speculation import Speculation
from outrider.engine.checkpoints.tokenizer import load_tokenizer
from outrider.protocol.sequence_key import SequenceKey
from outrider.speculation import SamplingParams, VerificationMode
from outrider.target.drafts.own_drafts import OwnDrafts
from outrider.target.requests.opening import Opening, Stopping
from outrider.target.requests.report import TargetStats
from outrider.target.step.sequence import TargetSequence
from outrider.target.step.times import Timer
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.models import DEFAULT_TARGET, fetched

from benchmarks.report import Row, finish, show, table
from benchmarks.support.prompts import prompts_option, read_prompts

_DRAFT_TOKENS = 32
_MAX_STEP_MS, _MAX_TOKEN_US = 0.3, 5.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What the step thread spends on lookups."""

    context: int
    step_ms: float
    token_us: float
    """Per committed token."""
    tokens_per_step: float
    proposals_per_step: float

    @property
    def holds(self) -> bool:
        return self.step_ms <= _MAX_STEP_MS and self.token_us <= _MAX_TOKEN_US

    def cells(self) -> Row:
        return {
            "CONTEXT": self.context,
            "MS/STEP": f"{self.step_ms:.3f}",
            "µS/TOKEN": f"{self.token_us:.2f}",
            "TOKENS/STEP": f"{self.tokens_per_step:.1f}",
            "PROPOSALS/STEP": f"{self.proposals_per_step:.1f}",
        }


@click.command("lookups")
@prompts_option
@click.option("--sequences", type=click.IntRange(1), default=64, show_default=True)
@click.option("--context", "contexts", type=click.IntRange(1), multiple=True, default=(60, 2000), show_default=True)
@click.option("--steps", type=click.IntRange(1), default=100, show_default=True)
@json_file_option
def lookups(prompts_file: Path, sequences: int, contexts: tuple[int, ...], steps: int, json_file: Path | None) -> int:
    """What do lookups cost between two steps?

    Processor time of one thread, without a model: each sequence goes through the prompts' text from a place of its own,
    and a step commits what was looked up as far as the text agrees, and one token more. All is counted that a target
    does for its own drafts: telling them of commits, keeping the index, looking up, buffering what was found.
    """
    text = "\n".join(prompt.text for prompt in read_prompts(prompts_file))
    tokens = load_tokenizer(asyncio.run(fetched(DEFAULT_TARGET, note))).encode(text)
    found = [_measured(tokens, sequences, context, steps) for context in contexts]
    show(table([cost.cells() for cost in found]), f"Bars: {_MAX_STEP_MS} ms a step, {_MAX_TOKEN_US} µs a token.")
    body = {"holds": all(cost.holds for cost in found), "sequences": sequences, "costs": list(map(asdict, found))}
    return finish("lookups", body, json_file)


def _measured(tokens: Sequence[int], num_sequences: int, context: int, steps: int) -> Cost:
    own, texts = OwnDrafts(make_sources(NAMES), TargetStats()), {}
    length = context + steps * (_DRAFT_TOKENS + 1)
    if length > len(tokens):
        raise click.UsageError(f"the prompts have {len(tokens)} tokens, and a sequence goes through {length}")
    for number in range(num_sequences):
        start = number * (len(tokens) - length) // num_sequences
        text, key = tokens[start : start + length], SequenceKey(1, number)
        sequence = _opened(key, text[:context])
        own.open(key, sequence.opening)
        texts[key] = sequence, text
    sequences = {key: sequence for key, (sequence, _) in texts.items()}
    for _ in range(context // 1000 + 1):
        own.offer(lambda key, tree: sequences[key].put(tree))
    spent_s, num_committed, num_proposals = 0.0, 0, 0
    for _ in range(steps):
        commits = [(sequence, sequence.committed_len, _verified(sequence, text)) for sequence, text in texts.values()]
        num_proposals += sum(1 for sequence in sequences.values() if sequence.drafts.trees)
        for sequence, _, accepted in commits:
            sequence.commit(accepted, len(accepted))
        started_s = time.thread_time()
        for sequence, base_len, accepted in commits:
            own.commit(sequence.key, base_len, accepted)
        own.offer(lambda key, tree: sequences[key].put(tree))
        spent_s += time.thread_time() - started_s
        num_committed += sum(len(accepted) for _, _, accepted in commits)
    return Cost(
        context, spent_s / steps * 1e3, spent_s / num_committed * 1e6, num_committed / steps, num_proposals / steps
    )


def _opened(key: SequenceKey, prompt: Sequence[int]) -> TargetSequence:
    speculation = Speculation(max_own_draft_tokens=_DRAFT_TOKENS)
    greedy = SamplingParams(temperature=0.0), VerificationMode.GREEDY
    opening = Opening(tuple(prompt), *greedy, Stopping(max_new_tokens=1 << 20), speculation=speculation)
    return TargetSequence(key, key.sequence_id, opening, 1 << 20, Timer(0.0))


def _verified(sequence: TargetSequence, text: Sequence[int]) -> list[int]:
    """What a step commits: the proposal as far as the text agrees, and the text's next token."""
    proposed, start = sequence.drafts.merged(), sequence.committed_len
    guess = proposed.guess() if proposed is not None else []
    agreed = next((n for n, token in enumerate(guess) if token != text[start + n]), len(guess))
    return list(text[start : start + agreed + 1])
