"""Candidates for verification, and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.errors import InvalidRequest
from outrider.options.logprobs import TokenLogprobs
from outrider.options.sampling import DraftDistribution, SamplingParams, VerificationMode
from outrider.speculation.logits import LogitsProcessor


@dataclass(slots=True)
class Candidate:
    """One sequence's drafted tokens, to be verified in one step."""

    params: SamplingParams
    mode: VerificationMode
    base_len: int
    """Absolute position of the first verified token, counted from the first prompt token."""
    draft: Sequence[int] = ()
    q: Sequence[DraftDistribution] = ()
    """Ratio mode: one per drafted token."""
    parents: Sequence[int] = ()
    """Tree: each token's parent as an index into draft, -1 for the root. Empty means a chain."""
    processor: LogitsProcessor | None = None
    """Processes the logits before tokens are chosen from them; None for nothing."""
    num_top: int | None = None
    """Log probabilities are asked for: of so many of the likeliest tokens, beside the chosen one; None: of none."""
    num_rows: int = field(init=False)
    """Rows of logits: one after the committed tokens and one after each drafted token."""

    def __post_init__(self) -> None:
        self.num_rows = len(self.draft) + 1
        if self.mode is VerificationMode.RATIO:
            if self.parents:
                raise InvalidRequest("parents", "trees are verified in greedy and coupled mode only")
            if len(self.q) != len(self.draft):
                raise InvalidRequest("q", f"{len(self.q)} distributions for {len(self.draft)} drafted tokens")
            for index, (token_id, q) in enumerate(zip(self.draft, self.q, strict=True)):
                if not q.count_of(token_id):
                    raise InvalidRequest(f"q[{index}]", f"gives no chance to the drafted token {token_id}")
        if self.parents and len(self.parents) != len(self.draft):
            raise InvalidRequest("parents", f"{len(self.parents)} parents for {len(self.draft)} drafted tokens")
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise InvalidRequest("parents", f"token {node} has parent {parent}: a parent comes before its child")

    def prefixes(self) -> Sequence[Sequence[int]]:
        """For each row, the drafted tokens before it."""
        if not self.parents:
            return [self.draft[:count] for count in range(self.num_rows)]
        found: list[list[int]] = [[]]
        for parent, token_id in zip(self.parents, self.draft, strict=True):
            found.append([*found[parent + 1], token_id])
        return found

    def depths(self) -> Sequence[int]:
        """For each row, how many drafted tokens it follows."""
        if not self.parents:
            return range(self.num_rows)
        found = [0]
        for parent in self.parents:
            found.append(found[parent + 1] + 1)
        return found

    def children(self, node: int) -> list[int]:
        """Indices of the tokens drafted after `node`; -1 is the root."""
        if self.parents:
            return [child for child, parent in enumerate(self.parents) if parent == node]
        return [node + 1] if node + 1 < len(self.draft) else []


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
    error: InvalidRequest | None = None
    """Why the target cannot choose a token; nothing is emitted then."""

    def cut_before(self, row: int, error: InvalidRequest) -> None:
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
