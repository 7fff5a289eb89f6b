"""What a draft may say."""

from __future__ import annotations

import pytest
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider_controller.router.drafts import DraftRules
from outrider_controller.router.session import BadReply, Request, Session

SAMPLING = sequence.Sampling(temperature=0.5, top_p=0.9, seed=3)


def session(mode: sequence.VerificationMode.ValueType) -> Session:
    stopping = sequence.Stopping(max_new_tokens=50)
    request = Request("r", "t", "m", (1, 2, 3), (4, 5), SAMPLING, stopping, False, 1, None, b"")
    return Session(request, mode, 100, opened_us=0)


RATIO = session(sequence.VERIFICATION_MODE_RATIO)
GREEDY = session(sequence.VERIFICATION_MODE_GREEDY)


def rules() -> DraftRules:
    return DraftRules(max_draft_tokens=3, max_context_len=60, epoch=2)


def drafted(**fields) -> sequence.Draft:
    return sequence.Draft(**{"epoch": 2, "base_len": 5, "token_ids": [7, 8], **fields})


def q(*pairs: tuple[int, int]) -> sequence.DraftDistribution:
    return sequence.DraftDistribution(token_ids=[t for t, _ in pairs], counts=[n for _, n in pairs])


SURE = [q((7, 65536)), q((8, 65535), (9, 1))]


@pytest.mark.parametrize(
    ("draft", "to"),
    [
        (drafted(), GREEDY),
        (drafted(token_ids=[]), GREEDY),
        (drafted(epoch=9, base_len=4), GREEDY),
        (drafted(parents=[-1, -1], confidence=[0.5, 1]), GREEDY),
        (drafted(q=SURE, sampling=SAMPLING), RATIO),
        (drafted(token_ids=[]), RATIO),
    ],
    ids=str,
)
def test_honest_drafts_pass_even_when_late_or_empty(draft, to):
    rules().check(draft, to)


def test_a_tree_may_have_more_tokens_than_a_chain_but_not_more_positions():
    tree = drafted(token_ids=[7, 8, 9, 10, 11], parents=[-1, 0, -1, 2, 3])
    assert rules().check(tree, GREEDY) == (5, 3)
    assert rules().check(drafted(), GREEDY) == (5, 2)


@pytest.mark.parametrize(
    ("field", "draft", "to"),
    [
        ("epoch", drafted(epoch=1), GREEDY),
        ("token_ids", drafted(token_ids=[1, 2, 3, 4]), GREEDY),
        ("token_ids", drafted(token_ids=[100]), GREEDY),
        ("base_len", drafted(base_len=2), GREEDY),
        ("base_len", drafted(base_len=61), GREEDY),
        ("parents", drafted(parents=[-1]), GREEDY),
        ("parents", drafted(parents=[-1, 1]), GREEDY),
        ("parents", drafted(parents=[-2, 0]), GREEDY),
        ("token_ids", drafted(token_ids=[7] * 4, parents=[-1, 0, 1, 2]), GREEDY),
        ("token_ids", drafted(token_ids=[7] * 257, parents=[-1] * 257), GREEDY),
        ("parents", drafted(parents=[-1, 0], q=SURE, sampling=SAMPLING), RATIO),
        ("confidence", drafted(confidence=[0.5]), GREEDY),
        ("confidence", drafted(confidence=[0.5, float("nan")]), GREEDY),
        ("confidence", drafted(confidence=[0.5, -1]), GREEDY),
        ("q", drafted(q=SURE), GREEDY),
        ("q", drafted(sampling=SAMPLING), RATIO),
        ("q", drafted(q=SURE[:1], sampling=SAMPLING), RATIO),
        ("sampling", drafted(q=SURE), RATIO),
        ("sampling", drafted(q=SURE, sampling=sequence.Sampling(temperature=0.6, top_p=0.9, seed=3)), RATIO),
        ("q", drafted(q=[SURE[0], q((8, 65535))], sampling=SAMPLING), RATIO),
        ("q", drafted(q=[SURE[0], q((8, 65536), (9, 0))], sampling=SAMPLING), RATIO),
        ("q", drafted(q=[SURE[0], q((8, 1), (8, 65535))], sampling=SAMPLING), RATIO),
        ("q", drafted(q=[SURE[0], q((9, 65536))], sampling=SAMPLING), RATIO),
        ("q", drafted(q=[SURE[0], q((8, 65535), (100, 1))], sampling=SAMPLING), RATIO),
        ("q", drafted(q=[SURE[0], sequence.DraftDistribution()], sampling=SAMPLING), RATIO),
        ("q", drafted(q=[SURE[0], q(*((i, 1024) for i in range(64)), (65, 0))], sampling=SAMPLING), RATIO),
    ],
    ids=str,
)
def test_a_draft_no_correct_worker_would_send_is_refused_by_field(field, draft, to):
    with pytest.raises(BadReply, match=rf"^draft\.{field}\b"):
        rules().check(draft, to)
