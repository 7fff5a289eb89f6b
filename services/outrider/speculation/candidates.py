"""What is verified of a sequence in a step, and what verification says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.errors import InvalidRequest
from outrider.options.logprobs import TokenLogprobs
from outrider.options.sampling import SamplingParams, VerificationMode
from outrider.speculation.logits import LogitsProcessor
from outrider.tree import DraftTree

_NO_DRAFT, _ANY = DraftTree(0), SamplingParams()


@dataclass(slots=True, eq=False)
class Candidate:
    """One sequence's draft, to be verified in one step. Verification fills in the accepted drafts and one token of the
    target's own; or the error."""

    params: SamplingParams = _ANY
    mode: VerificationMode = VerificationMode.COUPLED
    draft: DraftTree = field(default_factory=lambda: _NO_DRAFT)
    """From the committed length on, a parent before its children; without tokens only the next one is chosen. In ratio
    mode it has its q."""
    processor: LogitsProcessor | None = None
    """Processes the logits before tokens are chosen from them; None for nothing."""
    num_top: int | None = None
    """Log probabilities are asked for: of so many of the likeliest tokens, beside the chosen one; None: of none."""

    token_ids: Sequence[int] = ()
    accepted: Sequence[int] = ()
    """The nodes of the accepted drafts."""
    num_verified: int = 0
    """Positions verified: the accepted ones and the first rejected one, if any."""
    top: Sequence[TokenLogprobs] = ()
    """One per token, as computed, when requested."""
    error: Exception | None = None
    """Why the target cannot choose a token; nothing is emitted then."""

    def check(self) -> None:
        """Raises InvalidRequest."""
        if self.mode is VerificationMode.RATIO and len(self.draft.q) != len(self.draft):
            raise InvalidRequest("q", f"{len(self.draft.q)} distributions for {len(self.draft)} drafted tokens")

    @property
    def num_rows(self) -> int:
        """Rows of logits: one after the committed tokens and one after each drafted token."""
        return len(self.draft.token_ids) + 1

    @property
    def num_accepted(self) -> int:
        return len(self.accepted)

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

    @property
    def emitting(self) -> list[int]:
        """The rows that decide its tokens, in their order."""
        return [0, *(node + 1 for node in self.accepted)][: len(self.token_ids)]

    def prefixes(self) -> Sequence[Sequence[int]]:
        """For each row, the drafted tokens before it."""
        draft = self.draft
        if not draft.parents:
            return [draft.token_ids[:count] for count in range(self.num_rows)]
        found: list[list[int]] = [[]]
        for parent, token_id in zip(draft.parents, draft.token_ids, strict=True):
            found.append([*found[parent + 1], token_id])
        return found

    def decide(self, token_ids: Sequence[int], accepted: Sequence[int], num_verified: int) -> None:
        """What was found by an earlier attempt goes."""
        self.token_ids, self.accepted, self.num_verified = token_ids, accepted, num_verified
        self.top, self.error = (), None

    def cut_before(self, row: int, error: Exception) -> None:
        """Drops the tokens that `row` or a later one decides. Without the first row only the error is left.

        Exact: what is emitted depends on earlier rows alone.
        """
        if row == 0:
            self.decide((), (), 0)
            self.error = error
            return
        reached = next((count for count, node in enumerate(self.accepted, start=1) if node + 1 >= row), None)
        if reached is not None:
            self.decide(self.token_ids[:reached], self.accepted[:reached], reached)


class NotFinite(ArithmeticError):
    """Logits from which no token can be chosen: a NaN or +inf among them, or all -inf."""
