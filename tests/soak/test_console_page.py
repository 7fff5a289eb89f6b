"""The comparison of the console with the commands finds each value that differs."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("selenium")

from tests.soak.console_page import Comparison, Tables

WORKER = {"id": "target-1", "role": "target", "status": "ready", "model": "m", "address": "127.0.0.1:1"}
SAID: Tables = {
    "workers": [{**WORKER, "running": 3, "waiting": 0, "free_blocks": 70}],
    "sequences": [
        {
            "id": "r-1",
            "tenant": "shop",
            "target": "target-1",
            "draft": "draft-1",
            "output_tokens": 12,
            "seconds": 2.0,
            "acceptance": 0.506,
        }
    ],
    "tenants": [
        {
            "tenant": "shop",
            "target": "m",
            "mode": "on",
            "reason": "saves",
            "times_plain": 1.37,
            "times_plain_interval": [1.25, 1.48],
            "price": 0.0213,
        },
        {"tenant": "new"},
    ],
}
SHOWN: Tables = {
    "workers": [{**WORKER, "running": "3", "waiting": "0", "free blocks": "70", "tokens/s": "9"}],
    "sequences": [
        {
            "request": "r-1",
            "tenant": "shop",
            "target": "target-1",
            "draft": "draft-1",
            "tokens": "12",
            "lasts": "2.0 s",
            "acceptance": "0.51",
        }
    ],
    "tenants": [
        {
            "tenant": "shop",
            "speculation": "on",
            "target": "m",
            "row price": "0.02",
            "why": "saves: 1.37 × plain (1.25 to 1.48)",
        },
        {"tenant": "new", "speculation": "–", "target": "", "row price": "–", "why": ""},
    ],
}


def equal(shown: Tables, *said: Tables) -> set[str]:
    comparison = Comparison()
    for one in said:
        comparison.look(shown, one)
    return comparison.equal


def test_what_the_commands_say_is_equal() -> None:
    assert equal(SHOWN, SAID) == {"workers", "sequences", "tenants"}


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("workers", "status", "cordoned"),
        ("workers", "running", "2"),
        ("workers", "free blocks", "69"),
        ("sequences", "request", "r-2"),
        ("sequences", "draft", "draft-2"),
        ("sequences", "tokens", "13"),
        ("sequences", "lasts", "2.4 s"),
        ("sequences", "acceptance", "0.52"),
        ("sequences", "acceptance", "–"),
        ("tenants", "tenant", "zoo"),
        ("tenants", "speculation", "off"),
        ("tenants", "row price", "0.03"),
        ("tenants", "why", "costs: 1.37 × plain (1.25 to 1.48)"),
        ("tenants", "why", "saves: 1.37 × plain (1.25 to 1.49)"),
        ("tenants", "why", ""),
    ],
)
def test_one_value_that_differs_is_found(table: str, column: str, value: Any) -> None:
    shown = copy.deepcopy(SHOWN)
    shown[table][0][column] = value
    assert equal(shown, SAID) == {"workers", "sequences", "tenants"} - {table}


def test_a_number_that_grows_is_between_two_answers() -> None:
    later = copy.deepcopy(SAID)
    later["sequences"][0] |= {"output_tokens": 20, "seconds": 3.0}
    shown = copy.deepcopy(SHOWN)
    shown["sequences"][0] |= {"tokens": "15", "lasts": "2.4 s"}
    assert "sequences" in equal(shown, SAID, later)
    assert "sequences" not in equal(shown, later)


def test_a_row_that_is_missing_is_found() -> None:
    assert equal({name: rows[1:] for name, rows in SHOWN.items()}, SAID) == set()
