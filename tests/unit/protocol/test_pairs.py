"""Which workers can work together, and what is said of those that cannot."""

from __future__ import annotations

from typing import Any

import pytest
from outrider.protocol.pairs import compatibility_problem, unpaired
from outrider.rpc.v1 import worker_pb2 as worker

from tests.fakes import fake_info

TARGET = fake_info(worker.WORKER_ROLE_TARGET, worker_id="t")


def draft(worker_id: str = "d", **fields: Any) -> worker.WorkerInfo:
    return fake_info(worker.WORKER_ROLE_DRAFT, worker_id=worker_id, **fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"protocol_version": 2}, ["protocol_version"]),
        ({"tokenizer_fingerprint": "other"}, ["tokenizer_fingerprint"]),
        ({"tokenizer_fingerprint": "other", "vocab_size": 7}, ["tokenizer_fingerprint", "vocab_size"]),
    ],
)
def test_a_pair_that_cannot_work_is_told_what_differs(fields: dict[str, Any], said: list[str]) -> None:
    problem = compatibility_problem(TARGET, draft(**fields))
    assert problem is not None
    assert [name for name in ("protocol_version", "tokenizer_fingerprint", "vocab_size") if name in problem] == said
    assert all(repr(value).strip("'") in problem for value in fields.values())


def test_rows_beyond_the_tokens_keep_no_pair_apart() -> None:
    assert compatibility_problem(TARGET, draft()) is None
    assert compatibility_problem(TARGET, draft(vocab_size=TARGET.vocab_size + 64)) is None


def test_a_head_drafts_only_for_targets_that_send_what_it_reads() -> None:
    sends = fake_info(worker.WORKER_ROLE_TARGET, worker_id="t", features="abc")
    assert compatibility_problem(sends, draft(features="abc")) is None
    # Another draft needs nothing of it, and one of the version before does not know the field.
    assert compatibility_problem(sends, draft()) is None
    for target in (TARGET, fake_info(worker.WORKER_ROLE_TARGET, features="other")):
        problem = compatibility_problem(target, draft(features="abc"))
        assert problem is not None and "features is" in problem


def test_a_draft_is_unpaired_if_there_are_targets_and_none_can_use_it() -> None:
    stranger = draft("stranger", tokenizer_fingerprint="other")
    kin = fake_info(worker.WORKER_ROLE_TARGET, worker_id="kin", tokenizer_fingerprint="other")
    assert unpaired([draft(), stranger]) == {}
    assert list(unpaired([TARGET, draft(), stranger])) == ["stranger"]
    assert unpaired([TARGET, kin, draft(), stranger]) == {}
