from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from outrider.telemetry.logging import configure_logging, name_worker

logger = logging.getLogger("outrider.test")


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def configured(log_format: str) -> io.StringIO:
    stream = io.StringIO()
    configure_logging("draft", log_format, stream=stream)
    return stream


def test_json_is_one_object_a_line_with_component_level_and_fields() -> None:
    stream = configured("json")
    logger.info("opened %d\nsequences", 3, extra={"request_id": "r1", "num_tokens": 7, "what": "x" * 1000})
    logger.warning("after", extra={"color_message": "\x1b[36mafter"})
    first, second = lines(stream)
    assert (first["component"], first["level"], first["message"]) == ("draft", "info", "opened 3\nsequences")
    assert (first["request_id"], first["num_tokens"]) == ("r1", 7)
    assert len(first["what"]) == 200
    assert "request_id" not in second
    assert "color_message" not in second


@pytest.mark.parametrize("log_format", ["human", "json"])
def test_an_exception_is_logged_by_type_and_place_but_never_by_its_message(log_format: str) -> None:
    stream = configured(log_format)
    prompt = " ".join(["my", "secret", "diary"])
    try:
        raise ValueError(f"cannot tokenize {prompt!r}")
    except ValueError:
        logger.exception("a request failed")
    text = stream.getvalue()
    assert "ValueError" in text and "test_logging.py" in text
    assert "my secret" not in text


def test_human_lines_are_short_and_carry_the_fields() -> None:
    stream = configured("human")
    logger.info("opened", extra={"request_id": "r1"})
    assert stream.getvalue().endswith("I draft: opened request_id=r1\n")


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"log_format: 'xml'"):
        configure_logging("draft", "xml")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_unless_told_otherwise_lines_are_json_but_on_a_terminal() -> None:
    file, terminal = io.StringIO(), Terminal()
    for stream in (file, terminal):
        configure_logging("draft", stream=stream)
        logger.info("opened")
    assert json.loads(file.getvalue())["message"] == "opened"
    assert terminal.getvalue().endswith("I draft: opened\n")


def test_a_line_names_its_process_unless_it_is_about_another_worker() -> None:
    stream = configured("json")
    logger.info("one")
    name_worker("target-1")
    logger.info("two")
    logger.info("three", extra={"worker": "draft-7"})
    assert [line.get("worker") for line in lines(stream)] == [None, "target-1", "draft-7"]
