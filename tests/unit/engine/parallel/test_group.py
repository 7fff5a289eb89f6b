"""What a group refuses, how much each rank takes, and when a rank ends itself."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from outrider.engine import CheckpointError
from outrider.engine.memory import DoesNotFit, Need, kv_blocks
from outrider.engine.parallel.links import Kind, Link, PeerGone
from outrider.engine.parallel.sharding import check_device, check_divides, check_execution, rank_device
from outrider.engine.parallel.watchdog import BEAT, READY, Watchdog
from transformers import AutoConfig

GB = 10**9


@pytest.mark.parametrize(("size", "named"), [(3, "4 num_attention_heads"), (4, "2 num_key_value_heads")])
def test_heads_that_cannot_be_divided_are_named(tiny: Path, size: int, named: str) -> None:
    settings = AutoConfig.from_pretrained(tiny)
    check_divides(tiny, settings, 2)
    with pytest.raises(CheckpointError, match=f"tensor_parallel: {named} of .* cannot be divided by {size}"):
        check_divides(tiny, settings, size)


def test_an_execution_that_cannot_be_divided_is_named() -> None:
    check_execution("auto")
    with pytest.raises(CheckpointError, match="execution: native does not divide"):
        check_execution("native")


def test_a_draft_is_not_divided(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"outrider_draft": {}}))
    with pytest.raises(CheckpointError, match="is a draft"):
        check_divides(tmp_path, AutoConfig.from_pretrained(tiny), 2)


def test_each_rank_wants_a_gpu_of_its_own() -> None:
    missing = torch.cuda.device_count() + 1
    with pytest.raises(CheckpointError, match=f"tensor_parallel: {missing} GPUs are needed"):
        check_device("cuda", missing)
    check_device("cpu", missing)
    assert [rank_device("cuda", 0), rank_device("cuda", 3), rank_device("cpu", 3)] == ["cuda:0", "cuda:3", "cpu"]


def test_a_model_that_does_not_fit_one_device_fits_two() -> None:
    def need(shards: int) -> Need:
        return Need("llama-70b", 70 * GB, 2, "float16", 5 * 2**20 // shards, context_blocks=512, shards=shards)

    with pytest.raises(DoesNotFit):
        kv_blocks(need(1), 80 * GB, "cuda", blocks=None, kv_bytes=None)
    half = kv_blocks(need(2), 80 * GB, "cuda", blocks=None, kv_bytes=None)
    assert half == int((80 * GB * 0.95 - 70 * GB) * 0.9) // (5 * 2**19)
    with pytest.raises(DoesNotFit, match=r"a share of 1/2 of 70\.0 B parameters in float16 are 70\.0 GB"):
        kv_blocks(need(2), 60 * GB, "cuda", blocks=None, kv_bytes=None)


def test_a_link_carries_messages_of_any_length_and_its_end_is_seen() -> None:
    ours, theirs = Link.pair()
    ours.send(Kind.LOAD, bytes(100_000))
    ours.send(Kind.STOP)
    assert theirs.receive() == (Kind.LOAD, bytes(100_000))
    assert theirs.receive() == (Kind.STOP, b"")
    assert not theirs.wait_until_gone(0.01)
    ours.close()
    assert theirs.wait_until_gone(5)
    with pytest.raises(PeerGone):
        theirs.receive()
    with pytest.raises(PeerGone):
        theirs.send(Kind.READY)
    theirs.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


def test_a_rank_says_that_it_lives_and_ends_when_a_peer_goes(pipe: tuple[int, int]) -> None:
    ours, theirs = Link.pair()
    reasons: list[str] = []
    watchdog = Watchdog({ours.fileno(): "rank 1"}, pipe[1], 30, reasons.append)
    watchdog.start()
    watchdog.say_ready()
    assert set(os.read(pipe[0], 64)) <= {*BEAT, *READY}
    theirs.close()
    _until(reasons)
    assert reasons == ["rank 1 is gone"]
    ours.close()


def test_a_step_that_takes_too_long_ends_the_rank(pipe: tuple[int, int]) -> None:
    watchdog = Watchdog({}, pipe[1], 0.05)
    with watchdog.step():
        assert watchdog.look(0) == ""
        time.sleep(0.06)
        assert watchdog.look(0) == "a step takes longer than 0.05 s"
    assert watchdog.look(0) == ""


def test_a_rank_ends_when_who_started_it_is_gone(pipe: tuple[int, int]) -> None:
    watchdog = Watchdog({}, pipe[1], 30)
    os.close(pipe[0])
    assert watchdog.look(0) == "who started this group is gone"


def test_a_disarmed_watchdog_lets_go(pipe: tuple[int, int]) -> None:
    ours, theirs = Link.pair()
    reasons: list[str] = []
    watchdog = Watchdog({ours.fileno(): "rank 1"}, pipe[1], 30, reasons.append)
    watchdog.disarm()
    watchdog.start()
    theirs.close()
    time.sleep(0.1)
    assert not reasons
    ours.close()


def _until(found: list[str]) -> None:
    deadline_s = time.monotonic() + 5
    while not found:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
