"""The ops port: what it says of a process that lives, hangs, is not ready, and of its options."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http import HTTPStatus

import pytest
from outrider.masking import masked
from outrider.telemetry.metrics import SpeculationMetrics
from outrider.telemetry.ops import ANY_LOOPBACK_PORT, Ops, OpsServer, _may_ask, busy_check, serving_ops
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Inner:
    cache_salt_key: bytes = b"0123456789abcdef"
    max_draft_tokens: int = 5


@dataclass(frozen=True)
class Config:
    metadata_url: str = "redis://user:pass@h:1/0?password=x"
    api_keys: tuple[str, ...] = ("sk-1",)
    cache_salt_key_file: str = "/etc/key"
    collector: str = "https://h/traces"
    paths: dict[str, str] = field(default_factory=lambda: {"m": "/models/m"})
    inner: Inner = field(default_factory=Inner)


def get(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def ask(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    return await asyncio.to_thread(get, address, path, method)


async def test_every_page_is_served_until_the_block_is_left() -> None:
    async with serving_ops(Ops("target", Config()), ANY_LOOPBACK_PORT) as address:
        assert await ask(address, "/livez") == await ask(address, "/readyz") == (200, "ok\n")
        assert 'component="target"' in (await ask(address, "/metrics"))[1]
        assert json.loads((await ask(address, "/configz"))[1])["collector"] == "https://h/traces"
        assert (await ask(address, "/metrics?x=1"))[0] == 200
        assert await ask(address, "/livez", "HEAD") == (200, "")
        assert (await ask(address, "/nothing"))[0] == 404
        assert (await ask(address, "/livez", "POST"))[0] == 501
    with pytest.raises(urllib.error.URLError):
        await ask(address, "/livez")


def test_it_ends_at_once_however_seldom_it_looks_whether_it_should() -> None:
    server = OpsServer(Ops("target", Config()), ANY_LOOPBACK_PORT)
    thread = threading.Thread(target=server.serve_forever, args=(3600.0,), daemon=True)
    thread.start()
    # Until it has answered, it may not have begun to wait.
    assert get(server.bound, "/livez")[0] == HTTPStatus.OK
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_note_is_said_of_a_process_that_is_ready_and_fails_nothing() -> None:
    ops = Ops("target", Config(), notes={"kernels": "none"})
    assert (ops.page("/readyz").status, ops.page("/readyz").body) == (HTTPStatus.OK, b"ok\nkernels: none\n")
    assert ops.page("/livez").body == b"ok\n"
    ops.ready["server"] = lambda: "draining"
    assert ops.page("/readyz").body == b"server: draining\n"


async def test_without_an_address_nothing_is_opened() -> None:
    async with serving_ops(Ops("target", Config()), "") as address:
        assert address == ""


@pytest.mark.parametrize("listen", ["9090", "h:", ":1", "127.0.0.1:70000", "192.0.2.1:1"])
async def test_an_address_that_cannot_be_bound_is_named(listen: str) -> None:
    with pytest.raises(OSError, match="ops_listen"):
        async with serving_ops(Ops("target", Config()), listen):
            pass


async def test_an_event_loop_that_hangs_is_not_live() -> None:
    ops = Ops("router", Config())
    async with serving_ops(ops, ANY_LOOPBACK_PORT) as address:
        ops.live["event loop"] = busy_check(ops.beat, lambda: 1.0)
        while (await ask(address, "/livez"))[0] != HTTPStatus.OK:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        # Nothing runs in this loop from here on.
        while (answer := get(address, "/livez"))[0] == HTTPStatus.OK:
            time.sleep(0.1)  # noqa: ASYNC251
        assert answer[0] == HTTPStatus.SERVICE_UNAVAILABLE and answer[1].startswith("event loop: ")


def test_a_step_counts_as_hung_only_while_it_lasts_too_long() -> None:
    now_s, since_s = 100.0, None
    check = busy_check(lambda: since_s, lambda: 30.0, lambda: now_s)
    assert check() == ""
    since_s = 90.0
    assert check() == ""
    now_s = 120.5
    assert check() == "the one under way lasts 30.5 s, more than 30 s"
    since_s = None
    assert check() == ""


def test_what_is_not_ready_says_why_and_lives() -> None:
    ops = Ops("gateway", Config(), ready={"server": lambda: "no model is ready", "store": lambda: ""})
    assert ops.page("/livez").status == HTTPStatus.OK
    ready = ops.page("/readyz")
    assert (ready.status, ready.body) == (HTTPStatus.SERVICE_UNAVAILABLE, b"server: no model is ready\n")


def test_what_does_not_live_is_not_ready() -> None:
    ops = Ops("target", Config(), live={"step": lambda: "hangs"})
    assert ops.page("/readyz").status == ops.page("/livez").status == HTTPStatus.SERVICE_UNAVAILABLE


def test_secrets_are_masked_and_options_are_shown() -> None:
    assert masked(Config()) == {
        "metadata_url": "redis://***@h:1/0?***",
        "api_keys": "***",
        "cache_salt_key_file": "/etc/key",
        "collector": "https://h/traces",
        "paths": {"m": "/models/m"},
        "inner": {"cache_salt_key": "***", "max_draft_tokens": 5},
    }


def test_vllms_names_carry_the_same_values_on_a_page_of_their_own() -> None:
    registry = CollectorRegistry()
    ops = Ops("target", Config(), registry)
    SpeculationMetrics(registry, "m").round(num_drafted=5, num_verified=3, num_accepted=2)
    samples = {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(ops.page("/metrics/vllm").body.decode())
        for sample in family.samples
        if sample.labels.get("position", "0") == "0"
    }
    assert samples["vllm:spec_decode_num_draft_tokens_total"] == ({"model_name": "m", "engine": "0"}, 5)
    assert samples["vllm:spec_decode_num_accepted_tokens_per_pos_total"][1] == 1
    assert all(name.startswith("vllm:") for name in samples)
    assert b"vllm:" not in ops.page("/metrics").body


@pytest.mark.parametrize(
    ("path", "host", "reached_at", "may"),
    [
        ("/configz", "127.0.0.1:9009", "127.0.0.1", True),
        ("/configz", "localhost:9009", "127.0.0.1", True),
        ("/configz", "[::1]:9009", "::1", True),
        ("/configz", "", "127.0.0.1", True),
        ("/configz", "evil.example:9009", "127.0.0.1", False),
        ("/metrics", "evil.example", "127.0.0.1", False),
        ("/console/data", "127.0.0.1.evil.example", "127.0.0.1", False),
        ("/console/data", "evil.example.", "10.1.2.3", False),
        ("/console/data", "[bad", "10.1.2.3", False),
        ("/console/data", "10.1.2.3:9009", "10.1.2.3", True),
        ("/console/data", "control:9009", "10.1.2.3", True),
        ("/metrics", "target.example:9009", "10.1.2.3", True),
        ("/readyz", "target.example:9009", "10.1.2.3", True),
    ],
)
def test_a_page_of_another_site_whose_name_leads_here_reads_nothing(
    path: str, host: str, reached_at: str, may: bool
) -> None:
    assert _may_ask(path, host, reached_at) is may


async def test_who_asks_by_a_foreign_name_is_told_so() -> None:
    async with serving_ops(Ops("target", Config()), "127.0.0.1:0") as address:
        request = urllib.request.Request(f"http://{address}/configz", headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            await asyncio.to_thread(urllib.request.urlopen, request, timeout=10)
