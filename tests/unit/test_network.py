"""Which address a process advertises by itself, and whose loopback addresses are taken from a lease."""

from __future__ import annotations

import pytest
from outrider.metadata.connection.network import address_towards, own_network
from outrider.metadata.workers.directory import LeaseRecord, decode_lease
from outrider.rpc.v1 import control_pb2, worker_pb2
from outrider_controller.control.config import ControlConfig, parse_arguments

INFO = worker_pb2.WorkerInfo(worker_id="t1", role=worker_pb2.WORKER_ROLE_TARGET)
KEY = INFO.role, INFO.worker_id


def lease(address: str, network: str) -> bytes:
    return control_pb2.WorkerStatus(info=INFO, address=address, network=network).SerializeToString()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://127.0.0.1:1", "127.0.0.1"),
        ("redis://user:secret@127.0.0.1/0", "127.0.0.1"),
        ("rediss+sentinel://127.0.0.1:26379,127.0.0.2:26379/main", "127.0.0.1"),
    ],
)
def test_the_interface_towards_the_store_is_found(url: str, address: str) -> None:
    assert address_towards(url) == address


def test_a_store_behind_a_socket_shows_no_interface() -> None:
    with pytest.raises(OSError, match="advertise: auto finds no address"):
        address_towards("unix:///run/redis.sock")


def test_auto_is_refused_at_once_where_the_store_shows_no_interface() -> None:
    """What listens at one address advertises that, wherever the store is."""
    with pytest.raises(ValueError, match=r"^control\.advertise: auto finds no address"):
        ControlConfig(listen="0.0.0.0:0", advertise="auto", metadata_url="unix:///run/redis.sock", insecure=True)
    ControlConfig(listen="127.0.0.1:0", advertise="auto", metadata_url="unix:///run/redis.sock")


def test_auto_is_where_others_reach_a_process() -> None:
    everywhere = ControlConfig(listen="0.0.0.0:0", advertise="auto", metadata_url="redis://127.0.0.1:1", insecure=True)
    assert everywhere.advertised("0.0.0.0:7001") == "127.0.0.1:7001"
    assert ControlConfig(advertise="auto").advertised("10.0.0.7:7001") == "10.0.0.7:7001"
    assert ControlConfig(advertise="10.0.0.8:1").advertised("10.0.0.7:7001") == "10.0.0.8:1"


@pytest.mark.parametrize(
    ("url", "warned"),
    [
        ("redis://10.0.0.9:6379", True),
        ("rediss+sentinel://u:p@127.0.0.1:26379,10.0.0.9/main", True),
        ("redis://[::1]", False),
        ("redis://localhost:6379/0", False),
        ("unix:///run/redis.sock", False),
    ],
)
def test_a_loopback_address_beside_a_store_elsewhere_is_warned_of(
    url: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert ControlConfig(metadata_url=url).advertised("127.0.0.1:7001") == "127.0.0.1:7001"
    assert ("reached from this machine alone" in caplog.text) is warned


def test_auto_is_an_option() -> None:
    flags = ["--metadata", "redis://127.0.0.1:1", "--listen", "0.0.0.0:7001", "--insecure", "--advertise", "auto"]
    assert parse_arguments(flags).advertise == "auto"


def test_a_loopback_address_of_elsewhere_is_not_taken_from_a_lease() -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:7001 of t1 is the loopback interface of elsewhere"):
        decode_lease(KEY, lease("127.0.0.1:7001", "another machine"))
    for address, network in [("127.0.0.1:7001", own_network()), ("127.0.0.1:1", ""), ("10.0.0.7:1", "another machine")]:
        assert decode_lease(KEY, lease(address, network)).address == address


def test_a_lease_says_where_it_was_written_and_never_all_interfaces() -> None:
    record = LeaseRecord(INFO, worker_pb2.WorkerLoad(), "127.0.0.1:7001", 1)
    assert control_pb2.WorkerStatus.FromString(record.encode()).network == own_network() != ""
    with pytest.raises(ValueError, match="means all interfaces"):
        LeaseRecord(INFO, worker_pb2.WorkerLoad(), "0.0.0.0:7001", 1)
    with pytest.raises(ValueError, match="means all interfaces"):
        decode_lease(KEY, lease("0.0.0.0:7001", ""))
