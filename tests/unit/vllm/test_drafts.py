"""The drafts of one vLLM engine: what a step verifies, what is learned of it, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from outrider.protocol.rounds import SourceTokens
from outrider.sequence.key import Finish, SequenceKey
from outrider.sequence.speculation import Speculation
from outrider.target.drafts.choice import StepRoom
from outrider.target.drafts.sequence import SequenceDrafts
from outrider.target.requests.row import StepRow
from outrider.tree import DraftTree
from outrider.vllm.drafts import ChainRow, DraftBook

TEXT, FOUR = [1, 2, 3], Speculation(max_draft_tokens=4)
ROOMY = StepRoom(tokens=1 << 20, blocks=1 << 20, block_size=16)


def book(price: float = 0.0, **speculation: float) -> DraftBook:
    made = DraftBook(price_of=lambda cost: price)
    setting = Speculation(**({"max_draft_tokens": 4} | speculation))
    made.open("a", SequenceDrafts(TEXT.copy(), setting, setting))
    return made


def of(drafts: DraftBook, name: str = "a") -> SequenceDrafts:
    found = drafts.find(name)
    assert found is not None
    return found


def adjust(drafts: DraftBook, setting: Speculation) -> None:
    of(drafts).adjust(setting, setting)


def chosen(drafts: DraftBook, room: StepRoom = ROOMY, count: int = 100, length: int = 3) -> list[int]:
    found = drafts.choose([ChainRow("a", length, count)], room)
    return [token for one in found for token in one.token_ids[: one.count]]


def committed(
    drafts: DraftBook, tokens: list[int], verified: list[int], fresh: list[int], *, finished: bool = False
) -> ChainRow:
    """A step that verified these of the buffered tokens, and committed those."""
    chain = next(iter(drafts.choose([ChainRow("a", len(tokens), 100)], ROOMY)), None)
    tokens += fresh
    return drafts.committed("a", fresh, chain, len(verified), finished=finished)


def filled(result: ChainRow, fresh: list[int]) -> StepRow[None]:
    row = StepRow(sequence=None, key=SequenceKey(0, 1), base_len=result.base_len)
    result.fill(row, fresh, Finish.NONE)
    row.count_sources(row.verified)
    return row


def test_a_step_verifies_what_is_buffered_up_to_the_cap_and_the_requests_own_room() -> None:
    drafts = book()
    of(drafts).offer(DraftTree(3, (4, 5, 6, 7, 8, 9)))
    assert chosen(drafts) == [4, 5, 6, 7]
    assert chosen(drafts, count=2) == [4, 5]
    adjust(drafts, Speculation(max_draft_tokens=1))
    assert chosen(drafts) == [4]
    adjust(drafts, Speculation())
    assert chosen(drafts) == []


def test_of_a_tree_the_path_is_verified_on_which_most_tokens_are_expected_to_be_accepted() -> None:
    drafts = book()
    of(drafts).offer(DraftTree(3, (4, 5, 6, 7), parents=(-1, -1, 1, 0), chances=(0.2, 0.9, 0.9, 0.9)))
    assert chosen(drafts) == [5, 6]


def test_a_longer_path_is_better_than_a_likelier_first_token() -> None:
    drafts = book()
    tree = DraftTree(3, (4, 5, 6, 7, 8), parents=(-1, -1, 1, 2, 3), chances=(0.97, 0.85, 0.97, 0.97, 0.97))
    of(drafts).offer(tree)
    assert chosen(drafts) == [5, 6, 7, 8]
    assert chosen(drafts, count=1) == [4]


def test_what_is_looked_up_and_what_a_draft_worker_sends_are_one_tree() -> None:
    drafts = book(max_own_draft_tokens=3)
    of(drafts).offer(DraftTree(3, (4, 5), chances=(0.97, 0.2), source="model", serial=1))
    of(drafts).put(DraftTree(3, (4, 6, 7, 8), source="ngram", matched=8))
    # Their first token is the same, and the own cap is 3.
    verified = chosen(drafts)
    assert verified == [4, 6, 7]
    result = committed(drafts, of(drafts).tokens, verified, [4, 6, 9])
    row = filled(result, [4, 6, 9])
    assert row.sources == [
        SourceTokens("model", False, 1, 1, 1),
        SourceTokens("ngram", True, 2, 2, 1),
    ]
    assert row.token_sources == [0, 1, 1]
    assert (result.num_accepted, result.draft.token_ids[2:], result.draft.last_serial) == (2, (7,), 1)


def test_what_is_looked_up_has_a_cap_of_its_own_and_none_after_a_commit() -> None:
    drafts, found = book(max_draft_tokens=0, max_own_draft_tokens=2), DraftTree(3, (4, 5, 6), source="ngram", matched=4)
    of(drafts).put(found)
    assert chosen(drafts) == [4, 5]
    adjust(drafts, Speculation(max_draft_tokens=4))
    assert chosen(drafts) == []
    adjust(drafts, Speculation(max_own_draft_tokens=4))
    of(drafts).put(DraftTree(2, (9,), source="ngram", matched=4))
    assert chosen(drafts) == []
    of(drafts).put(found)
    committed(drafts, of(drafts).tokens, chosen(drafts), [4])
    assert chosen(drafts, length=4) == []


def test_a_token_is_verified_if_it_is_worth_its_row() -> None:
    tree = DraftTree(3, (4, 5, 6), chances=(0.97, 0.97, 0.02))
    cheap, dear = book(price=0.6), book(price=0.99)
    for drafts in (cheap, dear):
        of(drafts).offer(tree)
    assert chosen(cheap) == [4, 5]
    assert len(chosen(dear)) < 2
    weighty = book(price=0.99, weight=50.0)
    of(weighty).offer(tree)
    assert chosen(weighty) == [4, 5, 6]


@pytest.mark.parametrize(
    ("price", "speculation", "count"),
    [
        (0.0, Speculation(4, max_own_draft_tokens=8), 5),
        (0.0, Speculation(4, max_own_draft_tokens=2), 2),
        (0.0, Speculation(4), 0),
        (0.99, Speculation(4, max_own_draft_tokens=8), 0),
        (0.99, Speculation(4, max_own_draft_tokens=8, weight=50.0), 5),
    ],
)
def test_the_engines_own_drafts_go_by_cap_price_and_weight(price: float, speculation: Speculation, count: int) -> None:
    drafts = book(price)
    adjust(drafts, speculation)
    assert len(drafts.own_values("a", "eagle3", 5)) == count
    assert not drafts.own_values("gone", "eagle3", 5)


def test_a_chain_takes_the_place_of_the_engines_own_drafts_if_it_is_worth_more() -> None:
    drafts = book(max_own_draft_tokens=4)
    of(drafts).offer(DraftTree(3, (4, 5), chances=(0.97, 0.97)))
    [one] = drafts.choose([ChainRow("a", 3, 100)], ROOMY, {"a": 1.0})
    assert (one.token_ids, one.count) == ((4, 5), 2)
    assert not drafts.choose([ChainRow("a", 3, 100)], ROOMY, {"a": 3.0})


def test_the_engines_own_drafts_are_judged_by_what_was_accepted_of_them() -> None:
    drafts = book(max_own_draft_tokens=4)
    before = sum(drafts.own_values("a", "eagle3", 4))
    for _ in range(20):
        tokens = of(drafts).tokens
        tokens += (fresh := [7, 8])
        # Of tokens that were rejected nobody says which they were.
        chain = drafts.own_chain("a", "eagle3", [-1] * 4, fresh, 1)
        found = drafts.committed("a", fresh, chain, 4, finished=False)
        assert (len(found.draft), found.num_accepted, found.num_verified) == (4, 1, 2)
        assert filled(found, fresh).sources == [SourceTokens("eagle3", True, 4, 2, 1)]
    assert sum(drafts.own_values("a", "eagle3", 4)) < before
    tokens += [9, 2]
    ended = drafts.committed("a", [9, 2], drafts.own_chain("a", "eagle3", [-1] * 4, [9, 2], 4), 4, finished=True)
    assert (ended.num_accepted, ended.num_verified) == (2, 2)


def test_drafts_take_no_block_that_is_not_free_and_no_token_that_a_step_has_not() -> None:
    drafts = book()
    of(drafts).offer(DraftTree(3, (4, 5, 6)))
    assert chosen(drafts, StepRoom(tokens=2, blocks=9, block_size=16)) == [4, 5]
    # Position 3 and 4 are in the sequence's own block, 5 would open another.
    assert chosen(drafts, StepRoom(tokens=9, blocks=0, block_size=5)) == [4, 5]


def test_a_commit_says_what_was_accepted_and_the_rest_stays() -> None:
    drafts = book()
    tokens = of(drafts).tokens
    of(drafts).offer(DraftTree(3, (4, 5, 6, 7), serial=8))
    verified = chosen(drafts, count=2)
    result = committed(drafts, tokens, verified, [4, 5, 6])
    assert (len(result.draft), result.num_verified, result.num_accepted) == (2, 2, 2)
    assert (result.draft.last_serial, result.num_dropped) == (8, 0)
    assert chosen(drafts, length=6) == [7]
    result = committed(drafts, tokens, [7], [9])
    assert (result.num_verified, result.num_accepted, result.draft.token_ids) == (1, 0, (7,))
    assert chosen(drafts, length=7) == []


def test_a_stop_inside_accepted_drafts_verifies_nothing_after_it() -> None:
    drafts = book()
    of(drafts).offer(DraftTree(3, (4, 5, 6)))
    result = committed(drafts, of(drafts).tokens, chosen(drafts), [4, 5], finished=True)
    assert (len(result.draft), result.num_verified, result.num_accepted) == (3, 2, 2)


def test_what_a_grammar_forbids_is_not_verified() -> None:
    drafts = book()
    even = lambda ids: next((n for n, each in enumerate(ids) if each % 2), len(ids))  # noqa: E731
    of(drafts).num_possible = even
    of(drafts).offer(DraftTree(3, (4, 6, 7, 8)))
    assert chosen(drafts) == [4, 6]


def test_requests_that_are_closed_or_forgotten_have_no_drafts() -> None:
    drafts = book()
    of(drafts).offer(DraftTree(3, (4,)))
    drafts.close("a")
    assert chosen(drafts) == [] and not len(drafts)
    assert drafts.committed("a", [4], None, 0, finished=False).num_accepted == 0


def test_while_a_step_runs_a_draft_is_what_follows_the_tokens_that_it_should_commit() -> None:
    drafts = book()
    adjust(drafts, Speculation(max_draft_tokens=8))
    of(drafts).offer(DraftTree(3, (4, 5, 6, 7, 8)))
    [running] = drafts.choose([ChainRow("a", 3, 2)], ROOMY)
    tokens = of(drafts).tokens
    [chain] = drafts.choose([ChainRow("a", 3, 2, num_ahead=3)], ROOMY)
    assert (chain.token_ids, chain.count) == ((4, 5, 6, 7, 8), 2)
    tokens += [4, 5, 6]
    assert drafts.committed("a", [4, 5, 6], running, 2, finished=False).num_accepted == 2
    tokens += [7, 9]
    result = drafts.committed("a", [7, 9], chain, 2, finished=False)
    assert (result.draft.token_ids, result.num_verified, result.num_accepted) == ((7, 8), 2, 1)


def test_a_draft_is_dead_when_the_running_step_commits_something_else() -> None:
    drafts = book()
    adjust(drafts, Speculation(max_draft_tokens=8))
    of(drafts).offer(DraftTree(3, (4, 5, 6, 7, 8)))
    [chain] = drafts.choose([ChainRow("a", 3, 2, num_ahead=1)], ROOMY)
    assert (chain.token_ids[:3], chain.count) == ((4, 5, 6), 2)
    tokens = of(drafts).tokens
    tokens += [9]
    drafts.committed("a", [9], None, 0, finished=False)
    tokens += [5]
    result = drafts.committed("a", [5], chain, 2, finished=False)
    assert (len(result.draft), result.num_verified, result.num_accepted) == (0, 0, 0)


class Faulty(Sequence[int]):
    """The text of a request of which nothing can be followed."""

    def __getitem__(self, at: object) -> int:
        raise RuntimeError("planted")

    def __len__(self) -> int:
        raise RuntimeError("planted")


def test_a_lasting_fault_of_one_request_ends_its_drafts_alone_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafts = book()
    for name in ("bad", "worse"):
        drafts.open(name, SequenceDrafts(TEXT.copy(), FOUR, FOUR))
        of(drafts, name).offer(DraftTree(3, (4, 5)))
    choices = {one.request_id: one for one in drafts.choose([ChainRow(n, 3, 9) for n in ("bad", "worse")], ROOMY)}
    for name in choices:
        of(drafts, name).tokens = Faulty()  # type: ignore[assignment]
    of(drafts).offer(DraftTree(3, (4, 5, 6)))
    for name in ("bad", "worse"):
        assert not len(drafts.committed(name, [4], choices[name], 2, finished=False).draft)
        assert name not in drafts
    assert (drafts.forgotten, drafts.num_faults, len(caplog.records)) == (["bad", "worse"], 2, 1)
    assert chosen(drafts) == [4, 5, 6]


def test_a_request_that_cannot_be_chosen_for_is_forgotten_and_the_others_have_their_drafts() -> None:
    drafts = book()
    drafts.open("bad", SequenceDrafts(TEXT.copy(), FOUR, FOUR))
    for name in ("bad", "a"):
        of(drafts, name).offer(DraftTree(3, (4, 5, 6)))
    of(drafts, "bad").fit = None  # type: ignore[assignment]
    decoding = [ChainRow(name, 3, 100) for name in ("bad", "a")]
    assert [one.request_id for one in drafts.choose(decoding, ROOMY)] == ["a"] and drafts.forgotten == ["bad"]


def test_in_a_cache_that_is_almost_full_the_most_valuable_tokens_of_all_are_verified() -> None:
    drafts = book()
    for name, chances in (("b", (0.9, 0.1)), ("c", (0.8, 0.7))):
        drafts.open(name, SequenceDrafts(TEXT.copy(), FOUR, FOUR))
        of(drafts, name).offer(DraftTree(3, (4, 5), chances=chances))
    decoding = [ChainRow(name, 3, 100) for name in ("b", "c")]
    found = drafts.choose(decoding, StepRoom(tokens=3, blocks=9, block_size=16))
    assert {one.request_id: one.count for one in found} == {"b": 1, "c": 2}
