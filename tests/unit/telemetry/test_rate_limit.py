from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from outrider.telemetry.logging import RateLimit, configure_logging


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def logger(clock: Clock, kept: Kept) -> Iterator[logging.Logger]:
    """One that passes three of a kind within a second."""
    logger = logging.getLogger("outrider.test.rate_limit")
    limit = RateLimit(3, 1.0, clock)
    logger.addHandler(kept)
    logger.addFilter(limit)
    logger.propagate, logger.level = False, logging.DEBUG
    yield logger
    logger.removeHandler(kept)
    logger.removeFilter(limit)
    logger.propagate = True


def test_a_flood_of_one_kind_passes_only_as_often_as_allowed_and_says_how_many_were_held_back(
    logger: logging.Logger, kept: Kept, clock: Clock
) -> None:
    for number in range(1000):
        logger.warning("refused call %d", number)
    assert kept.messages == ["refused call 0", "refused call 1", "refused call 2"]
    clock.now_s += 1.0
    logger.warning("refused call %d", 1000)
    logger.warning("refused call %d", 1001)
    assert [getattr(record, "num_suppressed", 0) for record in kept.records[3:]] == [997, 0]


def test_a_flood_hides_neither_another_kind_nor_another_level_nor_what_is_no_problem(
    logger: logging.Logger, kept: Kept
) -> None:
    for _ in range(10):
        logger.warning("one")
        logger.info("served")
    logger.error("one")
    logger.warning("other")
    assert kept.messages.count("served") == 10
    assert kept.messages.count("one") == 4
    assert kept.messages[-1] == "other"


def test_messages_that_are_all_different_take_no_memory_for_ever(kept: Kept, clock: Clock) -> None:
    limit = RateLimit(1, 1.0, clock)
    for number in range(5000):
        record = logging.LogRecord("library", logging.ERROR, "x.py", 1, f"value {number}", None, None)
        assert limit.filter(record)
    assert len(limit._windows) <= 1024


def test_the_logs_of_a_process_are_limited_and_carry_the_count() -> None:
    root = logging.getLogger()
    handlers, level, stream = root.handlers[:], root.level, io.StringIO()
    try:
        configure_logging("router", "json", stream=stream)
        for _ in range(7500):
            logging.getLogger("some.library").error("a message that a peer can cause")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert 1 <= len(lines) <= 100
