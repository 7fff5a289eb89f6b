"""Candidates for verification, and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.errors import InvalidRequest, OutriderError
from outrider.options.logprobs import TokenLogprobs
from outrider.options.sampling import SamplingParams, VerificationMode
from outrider.speculation.logits import LogitsProcessor
from outrider.tree import DraftTree


@dataclass(slots=True)
class Candidate:
    """One sequence's draft, to be verified in one step."""

    params: SamplingParams
    mode: VerificationMode
    draft: DraftTree
    """From the committed length on; without tokens only the next one is chosen. In ratio mode it has its q."""
    processor: LogitsProcessor | None = None
    """Processes the logits before tokens are chosen from them; None for nothing."""
    num_top: int | None = None
    """Log probabilities are asked for: of so many of the likeliest tokens, beside the chosen one; None: of none."""
    num_rows: int = field(init=False)
    """Rows of logits: one after the committed tokens and one after each drafted token."""

    def __post_init__(self) -> None:
        self.num_rows = len(self.draft.token_ids) + 1
        if self.mode is VerificationMode.RATIO and len(self.draft.q) != len(self.draft):
            raise InvalidRequest("q", f"{len(self.draft.q)} distributions for {len(self.draft)} drafted tokens")

    @property
    def by_ratio(self) -> bool:
        """Whether a drafted token is accepted by p / q. A greedy p is a point mass: its token alone is accepted."""
        return self.mode is VerificationMode.RATIO and not self.params.greedy

    @property
    def positions(self) -> Sequence[int]:
        """For each row, that of the token which it decides."""
        if not self.draft.parents:
            return range(self.draft.base_len, self.draft.base_len + self.num_rows)
        return [self.draft.base_len + depth for depth in (0, *self.draft.depths())]

    def prefixes(self) -> Sequence[Sequence[int]]:
        """For each row, the drafted tokens before it."""
        draft = self.draft
        if not draft.parents:
            return [draft.token_ids[:count] for count in range(self.num_rows)]
        found: list[list[int]] = [[]]
        for parent, token_id in zip(draft.parents, draft.token_ids, strict=True):
            found.append([*found[parent + 1], token_id])
        return found


@dataclass(slots=True)
class Verdict:
    """The target's decision: the accepted drafts and one token of its own."""

    token_ids: list[int] = field(default_factory=list)
    num_accepted: int = 0
    num_verified: int = 0
    """Positions verified: the accepted ones and the first rejected one, if any."""
    path: list[int] = field(default_factory=list)
    """The candidate's rows after the first that belong to the accepted tokens: 1, 2, … for a chain."""
    logprobs: Sequence[TokenLogprobs] = ()
    """One per token, when requested."""
    error: OutriderError | None = None
    """Why the target cannot choose a token; nothing is emitted then."""

    def cut_before(self, row: int, error: OutriderError) -> None:
        """Drops the tokens that `row` or a later one decides. Without the first row only the error is left.

        Exact: what is emitted depends on earlier rows alone.
        """
        if row == 0:
            self.token_ids, self.num_accepted, self.num_verified, self.path, self.error = [], 0, 0, [], error
            return
        reached = next((count for count, each in enumerate(self.path, start=1) if each >= row), None)
        if reached is not None:
            self.token_ids, self.path = self.token_ids[:reached], self.path[:reached]
            self.num_accepted = self.num_verified = reached


class NotFinite(ArithmeticError):
    """Logits from which no token can be chosen: a NaN or +inf among them, or all -inf."""
