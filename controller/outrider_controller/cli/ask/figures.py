"""What is counted and timed of answers, and what follows from it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider_controller.cli.client import GatewayAnswer


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """Sums over one answer or many. Times are seconds of the client's clock unless noted."""

    tokens: int = 0
    seconds: float = 0.0
    """Request sent to last token."""
    decode_tokens: int = 0
    """Tokens after the first of each answer."""
    decode_s: float = 0.0
    """First token to last."""
    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    dropped: int = 0
    draft_us: int = 0
    verify_us: int = 0
    queue_us: int = 0
    round_us: int = 0
    """Of the router's clock; the others are durations that draft and target report."""

    @classmethod
    def of(cls, answers: Sequence[GatewayAnswer]) -> AnswerFigures:
        sums = [answer.sums for answer in answers]
        return cls(
            tokens=sum(len(answer.token_ids) for answer in answers),
            seconds=sum(answer.seconds for answer in answers),
            decode_tokens=sum(max(0, len(answer.token_ids) - 1) for answer in answers),
            decode_s=sum(answer.decode_s for answer in answers),
            rounds=sum(s.num_steps for s in sums),
            drafted=sum(s.num_draft_tokens for s in sums),
            verified=sum(s.num_verified_tokens for s in sums),
            accepted=sum(s.num_accepted_draft_tokens for s in sums),
            dropped=sum(s.num_dropped_draft_tokens for s in sums),
            draft_us=sum(s.draft_us for s in sums),
            verify_us=sum(s.verify_us for s in sums),
            queue_us=sum(s.queue_us for s in sums),
            round_us=sum(s.round_us for s in sums),
        )

    @property
    def tokens_per_second(self) -> float:
        """Over whole requests, their prefill included."""
        return _ratio(self.tokens, self.seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """From the first token on."""
        return _ratio(self.decode_tokens, self.decode_s)

    @property
    def acceptance(self) -> float:
        """Accepted / verified; a position after a rejection is not verified."""
        return _ratio(self.accepted, self.verified)

    @property
    def tokens_per_round(self) -> float:
        return _ratio(self.tokens, self.rounds)

    @property
    def round_ms(self) -> float:
        return _ratio(self.round_us / 1e3, self.rounds)

    @property
    def draft_ms(self) -> float:
        return _ratio(self.draft_us / 1e3, self.rounds)

    @property
    def verify_ms(self) -> float:
        return _ratio(self.verify_us / 1e3, self.rounds)

    @property
    def wire_ms(self) -> float:
        """What is left of a round: the way there and back, and the router."""
        return max(0.0, self.round_ms - self.draft_ms - self.verify_ms)

    def summary(self) -> dict[str, Any]:
        """Sums and what follows from them, for JSON."""
        derived = (
            "tokens_per_second",
            "decode_tokens_per_second",
            "acceptance",
            "tokens_per_round",
            "round_ms",
            "draft_ms",
            "wire_ms",
            "verify_ms",
        )
        return {**asdict(self), **{name: round(getattr(self, name), 4) for name in derived}}


def answer_figures(answer: GatewayAnswer) -> dict[str, Any]:
    """One answer for JSON, without its text."""
    return {
        "id": answer.id,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "usage": {
            "prompt_tokens": answer.usage.prompt_tokens,
            "completion_tokens": answer.usage.completion_tokens,
            "cached_tokens": answer.usage.cached_tokens,
        },
        "time_to_first_token_ms": round(answer.first_token_s * 1e3, 3),
        "figures": AnswerFigures.of([answer]).summary(),
        **({"receipt": answer.receipt} if answer.receipt else {}),
    }


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
