"""The command lines of a router and a control plane that run without Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from outrider_controller.config import parse_arguments as parse_controller
from outrider_controller.control.config import parse_arguments as parse_control
from outrider_controller.router.config import parse_arguments as parse_router

URL = ["--metadata", "redis://127.0.0.1:1"]


def test_a_router_alone_is_told_the_same_as_one_of_several(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k" * 40)
    shared = ["--max-draft-tokens", "7", "--max-wait-us", "1500", "--trace-tokens", "--drain-timeout", "9"]
    shared += ["--cache-salt-key-file", str(tmp_path / "key"), "--cluster-secret-file", str(tmp_path / "key")]
    alone = parse_router([*URL, *shared, "--listen", "127.0.0.1:7001"])
    (one,) = parse_controller([*URL, *shared, "--router-listen", "127.0.0.1:7001"]).routers()
    assert alone == one
    assert (alone.policy.max_draft_tokens, alone.drain_timeout_s, alone.cache_salt_key) == (7, 9.0, b"k" * 40)


@pytest.mark.parametrize("parse", [parse_router, parse_control])
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--metadata"),
        (["--metadata", "http://x"], "metadata"),
        ([*URL, "--listen", "0.0.0.0:7001"], "advertise"),
        ([*URL, "--cluster-secret-file", "/nonexistent"], "/nonexistent"),
        ([*URL, "--routers", "2"], "--routers"),
    ],
)
def test_a_bad_option_is_named(
    parse: Callable[[list[str]], Any], arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2 and named in capsys.readouterr().err
