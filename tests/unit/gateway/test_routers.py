"""Which router takes the next request."""

from __future__ import annotations

from outrider.gateway.routers import Rotation


def test_requests_go_round() -> None:
    rotation = Rotation()
    assert sorted(rotation.choose(["a", "b", "c"], 0.0) or "" for _ in range(6)) == ["a", "a", "b", "b", "c", "c"]


def test_a_router_that_failed_is_left_out_until_its_time_is_over() -> None:
    rotation = Rotation(cooldown_s=2.0)
    rotation.failed("a", 10.0)
    assert {rotation.choose(["a", "b"], 11.9) for _ in range(4)} == {"b"}
    assert {rotation.choose(["a", "b"], 12.0) for _ in range(4)} == {"a", "b"}


def test_a_router_that_answers_is_back_at_once() -> None:
    rotation = Rotation()
    rotation.failed("a", 0.0)
    rotation.recovered("a")
    assert {rotation.choose(["a", "b"], 0.1) for _ in range(4)} == {"a", "b"}


def test_when_all_failed_the_one_that_failed_first_is_tried() -> None:
    rotation = Rotation()
    rotation.failed("b", 0.0)
    rotation.failed("a", 1.0)
    assert rotation.choose(["a", "b"], 1.1) == "b"


def test_without_addresses_there_is_no_router() -> None:
    assert Rotation().choose([], 0.0) is None
