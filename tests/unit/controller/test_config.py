"""The controller's command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_controller.config import parse_arguments

URL = ["--metadata", "redis://127.0.0.1:1"]


def test_routers_share_one_drawn_salt_key_and_the_policy_given() -> None:
    config = parse_arguments([*URL, "--routers", "3", "--max-draft-tokens", "7", "--max-wait-us", "1500"])
    routers = config.routers()
    assert len(routers) == 3
    assert len({r.cache_salt_key for r in routers}) == 1
    assert len(routers[0].cache_salt_key) == 32
    assert (routers[0].policy.max_draft_tokens, routers[0].policy.max_wait_us) == (7, 1500)
    assert routers[0].cache_salt_key != parse_arguments(URL).routers()[0].cache_salt_key


def test_addresses_are_taken_one_per_router() -> None:
    config = parse_arguments([*URL, "--router-listen", "127.0.0.1:7001", "--router-listen", "127.0.0.1:7002"])
    assert [r.listen for r in config.routers()] == ["127.0.0.1:7001", "127.0.0.1:7002"]


def test_routers_that_listen_on_all_interfaces_are_reached_where_they_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listens = ["--router-listen", "0.0.0.0:7001", "--router-listen", "0.0.0.0:7002"]
    advertised = ["--router-advertise", "10.0.0.7:7001", "--router-advertise", "10.0.0.7:7002"]
    control = ["--control-listen", "[::]:7003", "--control-advertise", "10.0.0.7:7003"]
    words = [*URL, *listens, *advertised, *control, "--insecure"]
    with pytest.raises(SystemExit):
        parse_arguments(words)
    assert "cache_salt_key_file: needed where other machines can reach the router" in capsys.readouterr().err
    (tmp_path / "key").write_text("k" * 40)
    config = parse_arguments([*words, "--cache-salt-key-file", str(tmp_path / "key")])
    assert [r.advertise for r in config.routers()] == ["10.0.0.7:7001", "10.0.0.7:7002"]
    assert [one.advertise for one in config.controls()] == ["10.0.0.7:7003"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--router-listen", "0.0.0.0:7001"], "router.advertise"),
        (["--router-listen", "0.0.0.0:7001", "--router-advertise", "0.0.0.0:7001"], "router.advertise"),
        (
            ["--router-listen", "127.0.0.1:1", "--router-advertise", "a:1", "--router-advertise", "b:1"],
            "router_advertise",
        ),
        (["--control-listen", "0.0.0.0:7003"], "control.advertise"),
        (["--router-listen", "10.0.0.7:7001"], "router.listen"),
        (["--control-listen", "10.0.0.7:7003"], "control.listen"),
    ],
)
def test_an_address_that_nobody_could_reach_is_refused_by_name(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([*URL, *arguments])
    assert f"{named}: " in capsys.readouterr().err


def test_a_cluster_has_a_control_plane_that_stands_by(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k" * 40)
    cluster = ["--ray-address", "a:1", "--cache-salt-key-file", str(tmp_path / "key"), "--insecure"]
    wide = ["--control-listen", "0.0.0.0:7003", "--control-advertise", "10.0.0.7:7003", "--insecure"]
    assert len(parse_arguments(URL).controls()) == 1
    assert len(parse_arguments([*URL, *cluster]).controls()) == 2
    first, second = parse_arguments([*URL, *wide, "--control-planes", "2"]).controls()
    assert (first.listen, first.advertise) == ("0.0.0.0:7003", "10.0.0.7:7003")
    assert (second.listen, second.advertise) == ("0.0.0.0:0", "auto")


def test_nothing_but_the_cluster_is_needed_to_end_what_runs_there() -> None:
    assert parse_arguments([*URL, "--ray-address", "a:1", "--ray-stop-actors"]).ray.stop_actors


def test_the_salt_key_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k" * 40 + "\n")
    config = parse_arguments([*URL, "--cache-salt-key-file", str(tmp_path / "key")])
    assert config.routers()[0].cache_salt_key == b"k" * 40


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--metadata"),
        (["--metadata", "http://x"], "metadata"),
        ([*URL, "--routers", "0"], "routers"),
        ([*URL, "--control-planes", "0"], "control_planes"),
        ([*URL, "--ray-stop-actors"], "ray_stop_actors: needs ray_address"),
        ([*URL, "--routers", "2", "--router-listen", "127.0.0.1:1"], "routers"),
        ([*URL, "--max-draft-tokens", "99"], "max_draft_tokens"),
        ([*URL, "--drain-timeout", "0"], "drain_timeout"),
        ([*URL, "--ray-temp-dir", "/" + "x" * 60], "ray_temp_dir"),
        ([*URL, "--cache-salt-key-file", "/nonexistent"], "/nonexistent"),
        ([*URL, "--ray-address", "a:1"], "cache_salt_key_file"),
        ([*URL, "--ray-address", "a:1", "--router-listen", "127.0.0.1:1"], "router_listen"),
        ([*URL, "--ray-address", "nowhere"], "ray_address: 'nowhere' is not HOST:PORT"),
        ([*URL, "--frobnicate"], "--frobnicate"),
    ],
)
def test_a_bad_option_is_named_and_nothing_starts(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(arguments)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err
