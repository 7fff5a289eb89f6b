"""Messages to events and reports to messages; every bad field is named."""

from __future__ import annotations

import random
from typing import Any

import pytest
from outrider.draft import events
from outrider.draft.events import DraftReport, Proposed
from outrider.draft.wire import ProposalLimits, events_of, responses_of
from outrider.drafters.rounds import DraftChain
from outrider.errors import InvalidRequest
from outrider.rpc.v1 import draft_pb2
from outrider.rpc.v1 import sequence_pb2 as pb
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import DraftDistribution, Proposal, SamplingParams, VerificationMode
from outrider.tree import DraftTree
from outrider.worker.events import Closed, Failed, Opened, Refused, SequenceKey

LIMITS = ProposalLimits(max_context_len=16, max_draft_tokens=8)


def good_opening() -> pb.OpenSequence:
    return pb.OpenSequence(
        sequence_id=7,
        prompt_token_ids=[1, 2, 3],
        committed_token_ids=[4],
        sampling=pb.Sampling(temperature=0.5, top_k=5, top_p=0.5, min_p=0.25, seed=9),
        stopping=pb.Stopping(max_new_tokens=10, stop_token_ids=[2]),
        mode=pb.VERIFICATION_MODE_COUPLED,
        speculation=pb.Speculation(max_draft_tokens=5),
        cache_salt=b"salt",
    )


def test_an_opening_arrives_whole() -> None:
    [event] = events_of(draft_pb2.DraftRequest(opens=[good_opening()]), 3, LIMITS, 1.5)
    assert isinstance(event, Opened)
    assert (event.key, event.received_s) == (SequenceKey(3, 7), 1.5)
    spec = event.spec
    assert (spec.prompt, spec.committed, spec.salt) == ((1, 2, 3), (4,), b"salt")
    assert spec.params == SamplingParams(temperature=0.5, top_k=5, top_p=0.5, min_p=0.25, seed=9)
    assert spec.mode is VerificationMode.COUPLED
    assert (spec.speculation.max_draft_tokens, spec.max_new_tokens, spec.stop_token_ids) == (5, 10, frozenset({2}))


def test_events_keep_the_order_of_the_fields() -> None:
    request = draft_pb2.DraftRequest(
        closes=[pb.CloseSequence(sequence_id=1)],
        settings=[pb.SetSpeculation(sequence_id=2, speculation=pb.Speculation(max_draft_tokens=100))],
        commits=[
            pb.Commit(sequence_id=3, base_len=4, token_ids=[5]),
            pb.Commit(sequence_id=4, base_len=4, token_ids=[5], finish_reason=pb.FINISH_REASON_STOP),
        ],
        opens=[good_opening()],
    )
    _, *rest = events_of(request, 1, LIMITS, 2.0)
    assert rest == [
        events.DraftCommitted(SequenceKey(1, 3), 4, (5,), finished=False, received_s=2.0),
        events.DraftCommitted(SequenceKey(1, 4), 4, (5,), finished=True, received_s=2.0),
        events.Limited(SequenceKey(1, 2), Speculation(8), 2.0),
        Closed(SequenceKey(1, 1)),
    ]


# What a sequence may be is tests/unit/sequence/test_spec.py's to say.
@pytest.mark.parametrize(
    ("spoilt", "field"),
    [
        ({"prompt_token_ids": [1] * 17}, "prompt_token_ids"),
        ({"mode": pb.VERIFICATION_MODE_UNSPECIFIED}, "mode"),
        ({"mode": pb.VERIFICATION_MODE_GREEDY}, "mode"),
        ({"sampling": pb.Sampling(temperature=float("nan"), top_p=1)}, "sampling.temperature"),
        ({"sampling": pb.Sampling(temperature=0.5, top_p=0)}, "sampling.top_p"),
    ],
)
def test_a_bad_opening_is_refused_by_its_field(spoilt: dict[str, Any], field: str) -> None:
    message = good_opening()
    for name in spoilt:
        message.ClearField(name)  # type: ignore[arg-type]
    message.MergeFrom(pb.OpenSequence(**spoilt))
    [event] = events_of(draft_pb2.DraftRequest(opens=[message]), 1, LIMITS, 0.0)
    assert isinstance(event, Refused)
    assert event.key == SequenceKey(1, 7)
    assert isinstance(event.error, InvalidRequest)
    assert event.error.field == field


def test_ids_that_only_the_target_has_are_taken() -> None:
    """Its head may have more padding: a sequence does not lose its draft for it."""
    message = good_opening()
    message.prompt_token_ids[1] = message.committed_token_ids[0] = 2**32 - 1
    commit = pb.Commit(sequence_id=7, base_len=3, token_ids=[1, 2**32 - 1])
    opened, committed = events_of(draft_pb2.DraftRequest(opens=[message], commits=[commit]), 1, LIMITS, 0.0)
    assert isinstance(opened, Opened) and opened.spec.prompt[1] == 2**32 - 1
    assert isinstance(committed, events.DraftCommitted) and committed.token_ids == (1, 2**32 - 1)


def proposed(mode: VerificationMode, drafted: DraftTree, stream: int = 1) -> Proposed:
    spec = SequenceSpec((1,), SamplingParams(temperature=0.5, seed=3), mode)
    return Proposed(SequenceKey(stream, 7), 2, drafted, spec, since_s=1.0, compute_s=0.0015)


def test_a_proposal_says_where_it_belongs_and_what_it_took() -> None:
    drafted = DraftTree(9, (4, 5), chances=(0.5, 0.25), source="model")
    [(stream, response)] = responses_of(
        DraftReport(proposals=[proposed(VerificationMode.COUPLED, drafted)]), now_s=1.0025
    ).items()
    assert stream == 1
    [draft] = response.drafts
    assert (draft.sequence_id, draft.epoch, draft.base_len, list(draft.token_ids)) == (7, 2, 9, [4, 5])
    assert (list(draft.confidence), draft.source, draft.draft_us) == ([0.5, 0.25], "model", 2500)
    assert draft.compute_us == 1500
    assert not draft.q
    assert not draft.HasField("sampling")


def test_what_stands_beside_a_guess_travels_as_a_tree_of_which_the_guess_is_the_first_path() -> None:
    drafted = DraftTree(9, (4, 5, 9, 8), (-1, 0, 0, -1), (0.5, 0.25, 0.125, 0.0625), source="model")
    [response] = responses_of(DraftReport(proposals=[proposed(VerificationMode.GREEDY, drafted)]), now_s=1.0).values()
    [draft] = response.drafts
    assert (list(draft.token_ids), list(draft.parents)) == ([4, 5, 9, 8], [-1, 0, 0, -1])
    assert list(draft.confidence) == [0.5, 0.25, 0.125, 0.0625]


def chain_of_an_older_target(draft: pb.Draft) -> list[int]:
    """It verifies the path of first children, with no more than a leaf beside each of its tokens."""
    if not draft.parents:
        return list(draft.token_ids)
    path, last = [], -1
    for node, parent in enumerate(draft.parents):
        if parent == last:
            path.append(draft.token_ids[node])
            last = node
    return path


@pytest.mark.parametrize("seed", range(20))
def test_an_older_target_gets_the_guess_as_its_chain(seed: int) -> None:
    rng, chain = random.Random(seed), DraftChain(DraftTree(9), 8)
    for token in range(1, rng.randint(2, 9)):
        others = [(10 * token + number, 0.4) for number in range(rng.randint(0, 3))]
        chain.add(Proposal(token, 0.5, others=others))
    tree = chain.tree(rng.randint(0, 4))
    for drafted in filter(None, (tree, tree.after([1]))):
        [response] = responses_of(DraftReport(proposals=[proposed(VerificationMode.GREEDY, drafted)]), 1.0).values()
        sent = pb.Draft.FromString(response.drafts[0].SerializeToString())
        assert chain_of_an_older_target(sent) == chain.token_ids[drafted.base_len - 9 :]


def test_in_ratio_mode_a_proposal_carries_q_and_the_sampling_it_was_made_under() -> None:
    drafted = DraftTree(9, (4,), chances=(0.5,), q=(DraftDistribution((4, 5), (32768, 32768)),), source="model")
    [response] = responses_of(DraftReport(proposals=[proposed(VerificationMode.RATIO, drafted)]), now_s=1.0).values()
    [draft] = response.drafts
    assert (list(draft.q[0].token_ids), list(draft.q[0].counts)) == ([4, 5], [32768, 32768])
    assert (draft.sampling.temperature, draft.sampling.top_p, draft.sampling.seed) == (0.5, 1.0, 3)


def test_each_stream_gets_one_message_with_all_that_concerns_it() -> None:
    greedy = VerificationMode.GREEDY
    report = DraftReport(
        proposals=[
            proposed(greedy, DraftTree(9), 1),
            proposed(greedy, DraftTree(9), 2),
            proposed(greedy, DraftTree(9), 1),
        ],
        failures=[
            Failed(SequenceKey(2, 8), InvalidRequest("mode", "bad")),
            Failed(SequenceKey(3, 9), KeyError("secret text")),
        ],
    )
    responses = responses_of(report, now_s=1.0)
    assert {stream: (len(r.drafts), len(r.errors)) for stream, r in responses.items()} == {
        1: (2, 0),
        2: (1, 1),
        3: (0, 1),
    }
    [named] = responses[2].errors
    assert (named.sequence_id, named.code, named.reason, named.field) == (8, 3, "INVALID_FIELD", "mode")
    [unforeseen] = responses[3].errors
    assert (unforeseen.code, unforeseen.reason) == (13, "INTERNAL")
    assert "secret" not in unforeseen.message
