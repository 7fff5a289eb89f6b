"""From verification to commit: ends are exact, also inside an accepted block."""

from __future__ import annotations

import pytest
from outrider.sequence.key import Finish, SequenceKey
from outrider.target.requests.row import StepRow
from outrider.tree import DraftTree

# Three drafts accepted of four, the fourth rejected, then the target's own token.
VERIFIED = {"token_ids": [5, 6, 7, 8], "accepted": [0, 1, 2], "num_verified": 4}


@pytest.mark.parametrize(
    ("stops", "remaining", "committed"),
    [
        pytest.param(set(), 10, ([5, 6, 7, 8], 4, 3, Finish.NONE), id="no end"),
        pytest.param({6}, 10, ([5, 6], 2, 2, Finish.STOP), id="a stop inside the accepted block is the last one"),
        pytest.param({8}, 10, ([5, 6, 7, 8], 4, 3, Finish.STOP), id="the target's own token stops it"),
        pytest.param(set(), 3, ([5, 6, 7], 3, 3, Finish.LENGTH), id="the length ends inside the accepted block"),
        pytest.param(set(), 4, ([5, 6, 7, 8], 4, 3, Finish.LENGTH), id="the last token reaches the length"),
        pytest.param({7}, 3, ([5, 6, 7], 3, 3, Finish.STOP), id="a stop at the very length counts as a stop"),
        pytest.param({8}, 2, ([5, 6], 2, 2, Finish.LENGTH), id="a stop after the length does not count"),
    ],
)
def test_an_end_is_exact_wherever_it_is_in_the_block(
    stops: set[int], remaining: int, committed: tuple[list[int], int, int, Finish]
) -> None:
    draft = DraftTree(10, (5, 6, 7, 9))
    row = StepRow(sequence=None, key=SequenceKey(1, 1), base_len=10, draft=draft, **VERIFIED)  # type: ignore[arg-type]
    row.until_end(stops, remaining)
    assert (row.token_ids, row.num_verified, row.num_accepted, row.finish) == committed
    assert row.num_drafted == 4
