"""Samples: only where the tenant consents, only on the volume, bounded, and gone after `outrider delete samples`."""

from __future__ import annotations

import json
import logging
import os
import resource
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from cryptography.fernet import Fernet
from outrider.metadata.store import MetadataStore
from outrider.rpc.access.roles import ClusterSecret, Role, bearer
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import control_pb2, control_pb2_grpc, target_pb2_grpc, tenants_pb2
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider.samples import SampleStore, read_cipher
from outrider.telemetry.logging import JsonFormatter
from outrider_controller.control.config import ControlConfig
from outrider_controller.control.server import running_control
from transformers import AutoModelForCausalLM

from tests.integration.gateway.scripted_router import until
from tests.integration.target.test_server import BY_TORCH, Router, open_sequence, running_target
from tests.redis_server import EmbeddedServer

OWN = sp.Speculation(max_own_draft_tokens=4)
PROMPT = [371, 288, 301, 377, 290, 333, 312, 299, 371, 288, 301, 377, 290]
TEXT, NUMBERS = sp.SAMPLE_CONSENT_TEXT, sp.SAMPLE_CONSENT_ACCEPTANCE


async def answered(
    stub: target_pb2_grpc.TargetServiceAsyncStub, tenant: str, consent: sp.SampleConsent.ValueType, number: int = 1
) -> list[int]:
    router = Router(stub)
    await router.send(opens=[open_sequence(number, PROMPT, tenant=tenant, samples=consent, speculation=OWN)])
    await router.finished(number)
    await router.call.done_writing()
    assert not any(commit.logprobs for response in router.responses for commit in response.commits)
    return router.text[number]


@pytest.fixture
async def stack(tiny: Path, tmp_path: Path) -> AsyncIterator[Any]:
    """Two targets with one volume, and an operator's stub."""
    secret = ClusterSecret(b"0123456789abcdef")
    async with AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedServer.start(tmp_path / "metadata"))
        store = await stack.enter_async_context(MetadataStore.connect(server.url, call_timeout_s=5.0))
        options = {"lookups": "ngram", "metadata_url": server.url, "samples": str(tmp_path / "samples")}
        targets = [await stack.enter_async_context(running_target(tiny, BY_TORCH, **options)) for _ in range(2)]
        life = await stack.enter_async_context(running_control(ControlConfig(secret=secret), store))
        channel = await stack.enter_async_context(create_channel(life.address))
        operator = bearer(secret.token(Role.OPERATOR))
        yield [stub for _, stub in targets], control_pb2_grpc.ControlServiceStub(channel), operator, server.url


def forms(token_ids: Sequence[int]) -> Iterator[bytes]:
    """In which some of these tokens could lie in a file."""
    for start in range(len(token_ids) - 5):
        ids = token_ids[start : start + 6]
        yield from (mark.join(map(str, ids)).encode() for mark in (",", ", ", " "))
        yield from (struct.pack(f"{order}6{size}", *ids) for order in "<>" for size in "HIQ")
        message = sp.OpenSequence(prompt_token_ids=ids).SerializeToString()
        yield message[2:]


def holding(token_ids: Sequence[int], tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture) -> set[str]:
    """Which files, keys of Redis and log lines have these tokens. Searched byte by byte."""
    wanted = list(forms(token_ids))
    client = redis.Redis.from_url(url)
    client.save()
    places = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    places |= {f"redis {key!r}": client.dump(key) or b"" for key in client.scan_iter()}
    logged = "\n".join(JsonFormatter("test").format(record) for record in caplog.records)
    places["log"] = logged.encode()
    return {name for name, data in places.items() if any(each in data for each in wanted)}


async def test_what_a_tenant_consents_to_is_on_the_volume_and_after_an_erasure_nowhere(
    stack: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    stubs, control, operator, url = stack
    store = SampleStore(tmp_path / "samples")
    texts = [await answered(stub, "a", TEXT) for stub in stubs]
    await answered(stubs[0], "b", NUMBERS)
    await answered(stubs[0], "c", sp.SAMPLE_CONSENT_UNSPECIFIED)
    await answered(stubs[0], "..", TEXT)
    await until(lambda: [len(list(store.read(each))) for each in ("a", "b", "c", "..")] == [2, 1, 0, 1])
    assert [record["output"] for record in store.read("a")] == texts
    assert all(record["prompt"] == PROMPT for record in store.read("a"))
    [numbers] = store.read("b")
    assert "prompt" not in numbers and "output" not in numbers
    assert (numbers["prompt_tokens"], numbers["output_tokens"]) == (len(PROMPT), 20)
    files = [path for path in (tmp_path / "samples").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "samples").iterdir()} == {0o700}
    assert {Path(name).parts[:2] for name in holding(PROMPT, tmp_path, url, caplog)} == {
        ("samples", "tenant-a"),
        ("samples", "tenant-.."),
    }
    (store.of("a") / "distill-model").mkdir()
    (store.of("a") / "distill-model" / "shard").write_text(str(PROMPT))
    for tenant, count in (("a", 2), ("..", None), ("b", 1)):
        asked = control_pb2.DeleteHistoryRequest(tenant=tenant, samples=True)
        if count is None:
            store.erase(tenant)
            continue
        erased = await control.DeleteHistory(asked, metadata=operator)
        assert (erased.num_texts, list(erased.unreachable_targets)) == (count, [])
    assert not holding(PROMPT, tmp_path, url, caplog)
    # Only which orders stand, without a text.
    left = [path for path in (tmp_path / "samples").rglob("*") if path.is_file()]
    assert {path.parent.name for path in left} == {".orders"} and sum(path.stat().st_size for path in left) < 64
    audit = await control.ListAudit(control_pb2.ListAuditRequest(), metadata=operator)
    assert ("delete samples", "a", "operator") in [(one.action, one.name, one.by) for one in audit.entries]


async def test_a_running_sequence_is_not_recorded_after_an_erasure(stack: Any, tmp_path: Path) -> None:
    stubs, control, operator, _ = stack
    router = Router(stubs[0])
    long = {"stopping": sp.Stopping(max_new_tokens=300), "speculation": OWN, "tenant": "a", "samples": TEXT}
    await router.send(opens=[open_sequence(1, PROMPT, **long)])
    await router.read()
    await control.DeleteHistory(control_pb2.DeleteHistoryRequest(tenant="a", samples=True), metadata=operator)
    await router.finished(1)
    # Written by the same thread, after what was to be written before.
    erased = await control.DeleteHistory(control_pb2.DeleteHistoryRequest(tenant="a", samples=True), metadata=operator)
    assert len(router.text[1]) == 300 and erased.num_texts == 0


async def test_start_and_stop_of_samples_are_in_the_audit_trail(stack: Any) -> None:
    _, control, operator, _ = stack
    for consent in (TEXT, sp.SAMPLE_CONSENT_UNSPECIFIED):
        tenant = tenants_pb2.Tenant(name="a", samples=consent)
        await control.PutTenants(control_pb2.PutTenantsRequest(tenants=[tenant]), metadata=operator)
    audit = await control.ListAudit(control_pb2.ListAuditRequest(), metadata=operator)
    assert [(one.old.samples, one.new.samples) for one in audit.entries] == [(TEXT, 0), (0, TEXT)]
    wrong = tenants_pb2.Tenant(name="a", samples=7)  # type: ignore[arg-type]
    with pytest.raises(Exception, match="samples: 7 is none of its values"):
        await control.PutTenants(control_pb2.PutTenantsRequest(tenants=[wrong]), metadata=operator)


async def test_the_likeliest_tokens_are_those_of_transformers(tiny: Path, tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "samples")
    async with running_target(tiny, BY_TORCH, lookups="ngram", samples=str(store.directory)) as (_, stub):
        text = await answered(stub, "a", TEXT)
        await until(lambda: bool(list(store.read("a"))))
    [record] = store.read("a")
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *text]])).logits[0, len(PROMPT) - 1 : -1]
    top = logits.log_softmax(-1).topk(8)
    assert record["top_token_ids"] == top.indices.tolist()
    torch.testing.assert_close(torch.tensor(record["top_logprobs"]), top.values, atol=2e-3, rtol=0)


async def test_with_a_key_file_samples_are_encrypted(tiny: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(Fernet.generate_key())
    store = SampleStore(tmp_path / "samples", read_cipher(key))
    async with running_target(tiny, lookups="ngram", samples=str(store.directory), samples_key=read_cipher(key)) as (
        _,
        stub,
    ):
        await answered(stub, "a", TEXT)
        await until(lambda: bool(list(store.read("a"))))
    [record], [path] = store.read("a"), store.of("a").iterdir()
    assert record["prompt"] == PROMPT
    assert not any(each in path.read_bytes() for each in forms(PROMPT))
    assert json.loads(Fernet(key.read_bytes()).decrypt(path.read_bytes())) == record
    with pytest.raises(ValueError, match="another key"):
        list(SampleStore(store.directory).read("a"))


def test_where_there_is_too_much_the_highest_acceptance_goes_first_and_what_is_old_goes(tmp_path: Path) -> None:
    store = SampleStore(tmp_path, max_bytes=16_000, wall_clock=lambda: 1e9)
    for number in range(100):
        store.write("a" if number % 2 else "b", (number * 37 % 100) / 100, {"n": "x" * 480})
        sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
        assert sum(sizes) <= 16_000
    left = sorted(int(path.name[:4]) for path in tmp_path.rglob("*-*") if path.is_file())
    assert len(left) >= 25 and left[-1] <= 450
    for path in tmp_path.rglob("0*"):
        os.utime(path, (1e9 - 31 * 86_400, 1e9 - 31 * 86_400))
    store.prune()
    assert not list(store.read("a")) and not list(store.read("b"))


def test_no_jump_of_the_clock_removes_what_is_not_old_until_it_has_gone_on_from_there_for_a_day(
    tmp_path: Path,
) -> None:
    day, wall, running = 86_400.0, [1e9], [0.0]

    def store() -> SampleStore:
        return SampleStore(tmp_path, wall_clock=lambda: wall[0], clock=lambda: running[0])

    def passed(seconds: float) -> None:
        wall[0] += seconds
        running[0] += seconds

    here = store()
    here.write("a", 0.1, {"n": 1})
    for path in tmp_path.rglob("0*"):
        os.utime(path, (1e9, 1e9))
    for jump in (40 * day, -80 * day, 40 * day):
        wall[0] += jump
        for each in (here, store(), here):
            each.prune()
            passed(3600.0)
            assert here.count("a") == 1
    wall[0] += 40 * day
    here.prune()
    passed(day - 1)
    here.prune()
    assert here.count("a") == 1
    passed(2)
    here.prune()
    assert here.count("a") == 0


def test_time_that_passes_removes_what_is_old_also_where_nobody_looks_for_days(tmp_path: Path) -> None:
    days = [0.0]
    store = SampleStore(tmp_path, wall_clock=lambda: 1e9 + 86_400 * days[0], clock=lambda: 86_400 * days[0])
    store.write("a", 0.1, {"n": 1})
    for path in tmp_path.rglob("0*"):
        os.utime(path, (1e9, 1e9))
    for days[0] in (0.5, 3, 20, 29.9):
        store.prune()
        assert store.count("a") == 1
    for days[0] in (30.1, 31.2):
        store.prune()
    assert store.count("a") == 0


@pytest.mark.parametrize("restarts", [True, False])
def test_what_is_old_goes_also_on_a_machine_that_is_off_or_asleep_at_night_and_at_weekends(
    tmp_path: Path, restarts: bool
) -> None:
    hour, wall, running = 3600.0, [1e9], [0.0]

    def started() -> SampleStore:
        return SampleStore(tmp_path, wall_clock=lambda: wall[0], clock=lambda: running[0])

    store, days = started(), 0
    store.write("a", 0.1, {"n": 1})
    for path in tmp_path.rglob("0*"):
        os.utime(path, (1e9, 1e9))
    while store.count("a"):
        for _ in range(0 if days % 7 >= 5 else 8):
            store.prune()
            wall[0], running[0] = wall[0] + hour, running[0] + hour
        days += 1
        wall[0] = 1e9 + 24 * hour * days
        assert days < 40
        if restarts:
            store, running[0] = started(), 0.0
    assert days > 30


def test_whoever_reads_meanwhile_finds_whole_records_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, found, opened = SampleStore(tmp_path, wall_clock=lambda: 1e9), list[Any](), os.open

    def watched(*arguments: Any) -> int:
        descriptor = opened(*arguments)
        found.append(list(store.read("a")))
        return descriptor

    monkeypatch.setattr("outrider.samples.os.open", watched)
    store.write("a", 0.5, {"n": 1})
    assert found == [[]] and list(store.read("a")) == [{"n": 1}]
    # A process that ended before it had written all of one.
    left = store.of("a") / "new-0"
    left.touch()
    os.utime(left, (1e9 - 31 * 86_400, 1e9 - 31 * 86_400))
    store.prune()
    assert [path.name[:4] for path in store.of("a").iterdir()] == ["0500"]


def test_a_record_that_does_not_fit_on_the_volume_leaves_nothing_there(tmp_path: Path) -> None:
    store, (soft, hard) = SampleStore(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    store.write("a", 0.5, {"n": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            store.write("a", 0.5, {"n": "x" * 200})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name[:4] for path in store.of("a").iterdir()] == ["0500"]


def test_records_that_another_process_removes_meanwhile_are_passed_over(tmp_path: Path) -> None:
    reader, other = SampleStore(tmp_path), SampleStore(tmp_path, max_bytes=1)
    for number in range(3):
        reader.write("a", number / 10, {"n": number})
    records = reader.read("a")
    assert next(records) == {"n": 0}
    other.prune()
    assert list(records) == [] and reader.count("a") == 0
    reader.write("a", 0.1, {"n": 3})
    reader.write("a", 0.2, {"n": 4})
    records = reader.read("a")
    next(records)
    assert other.erase("a") == 2 and list(records) == []
