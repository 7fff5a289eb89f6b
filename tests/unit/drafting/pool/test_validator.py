"""The one place where a draft worker's message becomes a tree, or is refused by the name of a field."""

from __future__ import annotations

import random
from typing import Any

import pytest
from outrider.drafting.pool.validator import DraftValidator, DraftVocabulary
from outrider.errors import InvalidRequest
from outrider.limits import MAX_DRAFT_BYTES, MAX_SOURCE_BYTES
from outrider.options.sampling import SamplingParams, VerificationMode
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.sequence.spec import SequenceSpec
from outrider.tree import DraftTree

SAMPLING = sequence.Sampling(temperature=0.5, top_p=0.9, seed=3)


RATIO = VerificationMode.RATIO
GREEDY = VerificationMode.GREEDY


def validator(mode: VerificationMode) -> DraftValidator:
    spec = SequenceSpec((1, 2, 3), SamplingParams(temperature=0.5, top_p=0.9, seed=3), mode)
    return DraftValidator(spec, DraftVocabulary(100, 60), max_positions=3, epoch=2)


def drafted(**fields: object) -> sequence.Draft:
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
def test_honest_drafts_pass_even_when_late_or_empty(draft: Any, to: Any) -> None:
    assert validator(to).tree(draft).token_ids == tuple(draft.token_ids)


def test_a_tree_may_have_more_tokens_than_a_chain_but_not_more_positions() -> None:
    tree = drafted(token_ids=[7, 8, 9, 10, 11], parents=[-1, 0, -1, 2, 3])
    assert validator(GREEDY).tree(tree).depth == 3
    assert validator(GREEDY).tree(drafted()).depth == 2


# As processes of before wrote it: alternatives as leaves beside the guess 7, 8, and what is reserved now.
OLDER = (
    b"\x10\x02\x18\x05"  # epoch 2, base_len 5
    b"\x22\x04\x07\x08\x09\x0a"  # token_ids
    b"\x2a\x04\x01\x00\x00\x01"  # parents, as zigzag: -1, 0, 0, -1
    b"\x3a\x10\x00\x00\x00\x3f\x00\x00\x80\x3e\x00\x00\x80\x3e\x00\x00\x00\x3e"  # confidence
    b"\x60\x01\x70\x01"  # 12, run_ahead, and 14, prepared: true
)


def test_siblings_of_an_older_draft_become_a_tree() -> None:
    want = DraftTree(5, (7, 8, 9, 10), (-1, 0, 0, -1), (0.5, 0.25, 0.25, 0.125), epoch=2)
    assert validator(GREEDY).tree(sequence.Draft.FromString(OLDER)) == want


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
        ("source", drafted(source="n" * (MAX_SOURCE_BYTES + 1)), GREEDY),
        ("source", drafted(source="é" * (MAX_SOURCE_BYTES // 2 + 1)), GREEDY),
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
def test_a_draft_no_correct_worker_would_send_is_refused_by_field(field: str, draft: Any, to: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{field}\b"):
        validator(to).tree(draft)


def test_what_this_version_does_not_know_counts_as_bytes_too() -> None:
    # Field 4095, of bytes, of a length of 131,072.
    unknown = b"\xfa\xff\x01" + b"\x80\x80\x08" + bytes(131_072)
    assert len(unknown) > MAX_DRAFT_BYTES
    draft = sequence.Draft.FromString(drafted().SerializeToString() + unknown)
    with pytest.raises(InvalidRequest, match=r"^draft\b"):
        validator(GREEDY).tree(draft)


def test_a_draft_may_still_use_the_limit_it_had_before() -> None:
    now = validator(GREEDY)
    now.allow(1)
    assert now.tree(drafted(token_ids=[1, 2, 3])).depth == 3
    now.allow(4)
    assert now.tree(drafted(token_ids=[1, 2, 3, 4])).depth == 4


def test_a_refused_draft_does_not_raise_the_epoch() -> None:
    now = validator(GREEDY)
    with pytest.raises(InvalidRequest):
        now.tree(drafted(epoch=5, token_ids=[100]))
    assert now.tree(drafted(epoch=2)).depth == 2


def test_a_tree_has_all_that_its_message_says() -> None:
    message = drafted(
        token_ids=[7, 8, 9], parents=[-1, 0, 0], confidence=[0.5, 0.25, 0.125], source="model", matched=4, serial=3
    )
    message.share_us = 30
    tree = validator(GREEDY).tree(message)
    assert tree == DraftTree(
        *(5, (7, 8, 9), (-1, 0, 0), (0.5, 0.25, 0.125)), source="model", matched=4, epoch=2, serial=3, seconds=30 * 1e-6
    )


def mutated(chance: random.Random) -> sequence.Draft:
    """An honest message, of which some bytes are others."""
    honest = chance.choice([drafted(parents=[-1, -1], confidence=[0.5, 1]), drafted(q=SURE, sampling=SAMPLING)])
    data = bytearray(honest.SerializeToString())
    for _ in range(chance.randint(1, 4)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return sequence.Draft.FromString(bytes(data))


def test_ten_thousand_mutated_messages_are_refused_here_or_are_trees_that_fit() -> None:
    chance, refused, made = random.Random(8), 0, 0
    while refused + made < 10_000:
        try:
            message = mutated(chance)
        except Exception:
            # No message at all: gRPC ends the stream.
            continue
        mode = RATIO if message.q else GREEDY
        try:
            tree = validator(mode).tree(message)
        except InvalidRequest as error:
            assert error.field
            refused += 1
            continue
        made += 1
        assert tree.depth <= 3 and all(0 <= token < 100 for token in tree.token_ids) and 3 <= tree.base_len <= 60
    assert refused > 2000 and made > 1000
