from __future__ import annotations

import pytest
from outrider.errors import InvalidRequest
from outrider.protocol.convert import (
    distribution_to_proto,
    distributions_from_proto,
    mode_from_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from outrider.rpc.v1 import sequence_pb2
from outrider.speculation import DraftDistribution


def sampling(**fields: float) -> sequence_pb2.Sampling:
    return sequence_pb2.Sampling(**{"temperature": 0.8, "top_p": 0.95, **fields})


def test_sampling_survives_both_ways_without_loss() -> None:
    message = sampling(top_k=40, min_p=0.1, seed=2**64 - 1)
    assert sampling_to_proto(sampling_from_proto(message)) == message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", float("nan")),
    ],
)
def test_bad_sampling_is_refused_by_the_fields_name(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampling_from_proto(sampling(**{field: value}))
    assert caught.value.field == f"sampling.{field}"


@pytest.mark.parametrize("value", [0, 4, -1])
def test_a_mode_that_is_unset_or_unknown_is_refused(value: int) -> None:
    with pytest.raises(InvalidRequest, match="mode"):
        mode_from_proto(value)  # type: ignore[arg-type]


def test_a_distribution_survives_both_ways() -> None:
    distribution = DraftDistribution((5, 9), (65535, 1))
    assert distributions_from_proto([distribution_to_proto(distribution)]) == [distribution]


@pytest.mark.parametrize(
    ("token_ids", "counts"),
    [
        ([], []),
        ([1, 1], [32768, 32768]),
        ([1, 2], [65536]),
        ([1, 2], [65536, 0]),
        ([1, 2], [30000, 30000]),
        (list(range(65)), [1] * 64 + [65536 - 64]),
    ],
)
def test_a_distribution_that_is_none_is_refused_by_its_place(token_ids: list[int], counts: list[int]) -> None:
    good = sequence_pb2.DraftDistribution(token_ids=[3], counts=[65536])
    bad = sequence_pb2.DraftDistribution(token_ids=token_ids, counts=counts)
    with pytest.raises(InvalidRequest) as caught:
        distributions_from_proto([good, bad])
    assert (caught.value.field or "").startswith("q[1].")
