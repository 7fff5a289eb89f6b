"""What a finished draft is worth: the share of its tokens that the real verifier accepts, on prompts it never saw.

Both models run as they are served, through `outrider.sim.pair`. So a draft that learnt from a wrong teacher, or whose
file does not say what was trained, shows here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from outrider.drafters import ModelConfig, load_drafter
from outrider.engine import Engine, EngineConfig, Row
from outrider.engine.models.taps import HEAD_INPUT
from outrider.heads import DraftHead
from outrider.heads.check import guess_logits
from outrider.sim.pair import Pair
from outrider.speculation import Candidate, SamplingParams, VerificationMode, propose, verify
from outrider.tree import DraftTree

# Every proposed token is verified, so that the share depends on no clock and on no policy of serving.
_EVERY_TOKEN = ModelConfig(min_confidence=0.0, num_alternatives=0)
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=0)
Report = Callable[[int], None]
"""Told of tokens as they are answered."""
_CONCURRENCY = 16
_BLOCK = 16


def num_blocks(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """KV blocks in which an engine answers them as `share` does."""
    return _CONCURRENCY * -(-(max(map(len, prompts)) + max_new_tokens) // _BLOCK)


def share(
    target: Engine,
    draft: Path,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    params: SamplingParams = GREEDY,
    report: Report = lambda num_tokens: None,
) -> float:
    """Of the first drafted tokens those that the target accepts: it answers the prompts with this draft, which proposes
    one token in each step. Raises CheckpointError."""
    config = EngineConfig(num_blocks=num_blocks(prompts, max_new_tokens), device=target.info.device)
    drafter = load_drafter(draft, engine=config, model=_EVERY_TOKEN)
    pair = Pair(target, drafter, max_sequences=_CONCURRENCY, max_draft_tokens=1, row_price=lambda _: 0.0, lookups=())
    answers = pair.answer(prompts, max_new_tokens, speculate=True, params=params, report=report)
    verified = sum(answer.num_verified for answer in answers)
    return round(sum(answer.num_accepted for answer in answers) / max(verified, 1), 4)


def share_of_head(
    target: Engine,
    head: DraftHead,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    params: SamplingParams = GREEDY,
    report: Report = lambda num_tokens: None,
) -> float:
    """As `share`, of a head for the target: it reads the target's states over each answer, and its guesses are verified
    as in serving. After an accepted token comes one that nothing was drafted for."""
    plain = Pair(target, None, max_sequences=_CONCURRENCY)
    answers = plain.answer(prompts, max_new_tokens, speculate=False, params=params, report=report)
    verdicts = [
        verdict
        for prompt, answer in zip(prompts, answers, strict=True)
        for verdict in _verdicts(target, head, list(prompt), answer.token_ids, params)
    ]
    return round(sum(verdicts) / max(len(verdicts), 1), 4)


def _verdicts(
    target: Engine, head: DraftHead, prompt: list[int], answer: list[int], params: SamplingParams
) -> Iterator[bool]:
    """Whether the target accepts each token that the head drafts, from the second of the answer on."""
    text, mode = [*prompt, *answer], VerificationMode.GREEDY if params.greedy else VerificationMode.COUPLED
    sequence = target.kv.open([])
    row = Row(sequence, text, len(answer) + 1, num_tapped=len(text))
    logits, states = target.forward_tapped([row], head.taps or (HEAD_INPUT,))
    target.kv.close(sequence)
    guesses = guess_logits(head, torch.tensor(text, device=states.device), states)
    token_map = None if head.token_map is None else head.token_map.to(guesses.device)
    position = len(prompt) + 1
    while position < len(text):
        [proposal] = propose(guesses[position - 2, None], [params], [mode], [position], token_map=token_map)
        first = position - len(prompt)
        candidate = Candidate(params, mode, DraftTree(position, (proposal.token_id,)))
        verify(logits[first : first + 2], [candidate])
        yield candidate.num_accepted > 0
        position += 1 + candidate.num_accepted
