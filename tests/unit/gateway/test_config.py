"""The command line: what it gives, and that nonsense is refused by name."""

from __future__ import annotations

import math

import pytest
from outrider.address import split_address
from outrider.gateway.config import parse_arguments as parse


def test_routers_models_and_limits_are_taken_over() -> None:
    config = parse(
        [
            *("--router", "a:1", "--router", "b:2"),
            *("--max-body-bytes", "1000", "--failover-window", "7"),
            *("--max-streams", "9", "--header-timeout", "1.5"),
        ]
    )
    assert config.routers == ("a:1", "b:2")
    assert (config.limits.max_body_bytes, config.failover.window_s) == (1000, 7)
    assert (config.limits.max_streams, config.limits.header_timeout_s) == (9, 1.5)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--router"),
        (["--router", "nowhere"], "nowhere"),
        (["--router", "a:99999"], "a:99999"),
        (["--router", "a:1", "--max-running", "0"], "max_running"),
        (["--router", "a:1", "--request-timeout", "nan"], "request_timeout_s"),
        (["--router", "a:1", "--idle-timeout", "inf"], "idle_timeout_s"),
        (["--router", "a:1", "--max-connections", "0"], "max_connections"),
        (["--router", "a:1", "--speed", "9"], "--speed"),
    ],
)
def test_an_option_that_cannot_be_ends_with_its_name(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


def test_an_ipv6_host_stands_in_brackets() -> None:
    assert split_address("[::1]:80") == ("::1", 80)


def test_a_gateway_on_all_interfaces_says_where_to_reach_it(capsys: pytest.CaptureFixture[str]) -> None:
    everywhere = ["--listen-grpc", "0.0.0.0:8001", "--metadata", "redis://127.0.0.1:1"]
    with pytest.raises(SystemExit):
        parse(everywhere)
    assert "advertise: needed where '0.0.0.0:8001' listens on all interfaces" in capsys.readouterr().err
    reachable = [*everywhere, "--advertise", "10.0.0.7:8001"]
    with pytest.raises(SystemExit):
        parse(reachable)
    assert "give public_tls_dir, or insecure for plain text" in capsys.readouterr().err
    assert parse([*reachable, "--insecure"]).advertise == "10.0.0.7:8001"


def test_a_gateway_that_others_reach_leaves_in_time_for_them_to_turn_away() -> None:
    alone, reached = ["--router", "a:1"], ["--router", "a:1", "--listen-http", "10.0.0.7:80", "--insecure"]
    assert (parse(alone).leaving_s, parse(alone).connection_age_s) == (0, math.inf)
    assert parse(reached).leaving_s == 5
    assert parse([*reached, "--drain-delay", "0"]).leaving_s == 0
    # A connection that was opened late in the delay ends within it.
    assert parse([*alone, "--drain-delay", "40"]).connection_age_s == pytest.approx(12)
