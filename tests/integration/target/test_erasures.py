"""An erasure of samples is an order that stands: it is done when all have obeyed, and holds for who was away. Whether
texts are left is searched in every file.
"""

from __future__ import annotations

import asyncio
import signal
import struct
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from outrider.metadata.store import MetadataStore
from outrider.metadata.tenants.tenants import DERIVED
from outrider.rpc.access.roles import ClusterSecret, Role, bearer
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import control_pb2, control_pb2_grpc, target_pb2_grpc, tenants_pb2
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider.samples import SampleStore, read_cipher
from outrider_controller.cli.app import run
from outrider_controller.cli.drafts import distill
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.control.config import ControlConfig
from outrider_controller.control.server import running_control

from tests.integration.gateway.scripted_router import until
from tests.integration.target.test_server import BY_TORCH, Router, open_sequence, running_target
from tests.redis_server import EmbeddedServer

SECRET = ClusterSecret(b"0123456789abcdef")
OPERATOR = bearer(SECRET.token(Role.OPERATOR))
MARK = [371, 288, 301, 377, 290, 333, 312, 299]
OWN = sp.Speculation(max_own_draft_tokens=4)
# So likely that the answer repeats itself: only an answer for which drafts were verified is recorded.
REPEATING = sp.LogitsOptions(repetition_penalty=1, bias_token_ids=[40], biases=[30])


def marked(directory: Path) -> set[str]:
    """The files that have the prompt's tokens, as text or as numbers of two, four or eight bytes."""
    wanted = [mark.join(map(str, MARK)).encode() for mark in (",", ", ", " ")]
    wanted += [struct.pack(f"<8{size}", *MARK) for size in "HIQ"]
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path) for path in files if any(each in path.read_bytes() for each in wanted)}


async def answered(stub: target_pb2_grpc.TargetServiceAsyncStub, consent_us: int, number: int = 1) -> None:
    router, opening = Router(stub), {"tenant": "a", "samples": sp.SAMPLE_CONSENT_TEXT, "speculation": OWN}
    opening |= {"logits": REPEATING, "consent_unix_us": consent_us}
    await router.send(opens=[open_sequence(number, MARK * 2, **opening)])
    await router.finished(number)
    assert not router.errors, router.errors
    await router.call.done_writing()


@dataclass
class Cluster:
    tiny: Path
    directory: Path
    server: EmbeddedServer
    store: MetadataStore
    control: Any
    url: str

    def target(self, name: str, **options: Any) -> Any:
        """One with a volume of this name."""
        volume = str(self.directory / name)
        return running_target(self.tiny, BY_TORCH, lookups="ngram", metadata_url=self.url, samples=volume, **options)

    async def delete(self, tenant: str = "a") -> control_pb2.DeleteHistoryResponse:
        asked = control_pb2.DeleteHistoryRequest(tenant=tenant, samples=True)
        response: control_pb2.DeleteHistoryResponse = await self.control.DeleteHistory(asked, metadata=OPERATOR)
        return response

    async def pending(self) -> list[str]:
        found = await self.control.ListErasures(control_pb2.ListErasuresRequest(), metadata=OPERATOR)
        [one] = [one for one in found.erasures if one.tenant == "a" and one.samples]
        return list(one.pending)

    async def done(self) -> None:
        async with asyncio.timeout(60):
            while await self.pending():  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def consent_us(self) -> int:
        """As a gateway reads it now."""
        async with asyncio.timeout(60):
            while (found := await self.store.tenants.find(None)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return found.read_unix_us


@pytest.fixture
async def cluster(tiny: Path, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedServer.start(tmp_path / "metadata"))
        store = await stack.enter_async_context(MetadataStore.connect(server.url, call_timeout_s=5.0))
        life = await stack.enter_async_context(running_control(ControlConfig(secret=SECRET), store))
        channel = await stack.enter_async_context(create_channel(life.address))
        stub = control_pb2_grpc.ControlServiceStub(channel)
        yield Cluster(tiny, tmp_path / "volumes", server, store, stub, server.url)


async def test_a_target_that_was_down_erases_before_it_serves_and_the_order_is_pending_until_then(
    cluster: Cluster,
) -> None:
    async with cluster.target("one") as (_, here), cluster.target("two") as (_, away):
        for stub in (here, away):
            await answered(stub, await cluster.consent_us())
        await until(lambda: len(marked(cluster.directory)) == 2)
    async with cluster.target("one"):
        erased = await cluster.delete()
        assert erased.num_texts == 1 and not marked(cluster.directory / "one")
        [pending] = erased.pending
        assert "two" in pending and await cluster.pending() == [pending]
        assert marked(cluster.directory / "two")
        async with cluster.target("two"):
            # No router knows it yet.
            assert not marked(cluster.directory)
            await cluster.done()
            assert not marked(cluster.directory)


async def test_an_order_holds_after_the_metadata_store_was_restarted_and_after_it_lost_its_data(
    cluster: Cluster, tmp_path: Path
) -> None:
    consent_us = await cluster.consent_us()
    for name in ("one", "two"):
        async with cluster.target(name) as (_, stub):
            await answered(stub, consent_us)
    async with cluster.target("one"):
        await cluster.delete()
    cluster.server.stop()
    for found in (tmp_path / "metadata").glob("*.rdb"):
        found.unlink()
    with EmbeddedServer.start(tmp_path / "metadata") as again:
        assert again.url == cluster.url
        # The volume that has obeyed tells the store; the other one obeys.
        async with cluster.target("one"), cluster.target("two"):
            assert not marked(cluster.directory)


async def test_a_request_that_began_with_the_consent_of_before_is_not_recorded_later(cluster: Cluster) -> None:
    async with cluster.target("one") as (_, stub):
        before_us = await cluster.consent_us()
        await cluster.delete()
        # A gateway that has read the consent before, and a target that took the sequence over from one that was lost.
        await answered(stub, before_us)
        await answered(stub, 0, number=2)
        # A target erases after it has written what it had: of tenant a, nothing.
        await cluster.delete("b")
        assert not marked(cluster.directory)
        assert (await cluster.delete()).num_texts == 0
        await answered(stub, await cluster.consent_us(), number=3)
        await until(lambda: len(marked(cluster.directory)) == 1)


async def test_an_erasure_under_load_leaves_nothing_though_several_processes_write_there(cluster: Cluster) -> None:
    consent_us = await cluster.consent_us()
    async with cluster.target("one"), cluster.target("one"):
        stop, written = threading.Event(), [0, 0, 0]

        def write(number: int) -> None:
            store = SampleStore(cluster.directory / "one")
            while not stop.is_set():
                store.write("a", 0.5, {"prompt": MARK}, consent_us)
                written[number] += 1

        writers = [threading.Thread(target=write, args=(number,)) for number in range(len(written))]
        for writer in writers:
            writer.start()
        try:
            await until(lambda: min(written) > 20)
            erased = await cluster.delete()
            reported = marked(cluster.directory)
            count = list(written)
            await until(lambda: min(now - then for now, then in zip(written, count, strict=True)) > 20)
        finally:
            stop.set()
            for writer in writers:
                writer.join()
        assert erased.num_texts > 0 and not erased.pending
        assert not reported and not marked(cluster.directory)


async def test_an_erasure_waits_for_a_distillation_that_has_read_the_samples_and_ends_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "_WATCH_S", 0.05)
    store, interrupted = SampleStore(cluster.directory / "one"), threading.Event()
    monkeypatch.setattr("_thread.interrupt_main", lambda _: interrupted.set())
    async with cluster.target("one"):
        store.write("a", 0.5, {"prompt": MARK}, await cluster.consent_us())
        with pytest.raises(CommandError, match="samples of a are erased"), distill._reading(store.directory, "a"):
            erased = await cluster.delete()
            assert "somebody has read samples" in "".join(erased.pending)
            await asyncio.to_thread(interrupted.wait, 60)
            # What it writes until it ends.
            work = store.of("a") / "distill-model"
            work.mkdir(parents=True)
            (work / "shard").write_bytes(struct.pack("<8H", *MARK))
            raise CommandError("interrupted")
        await cluster.done()
        assert not marked(cluster.directory)
        # What is made of later samples stays, also when the order comes again.
        store.write("a", 0.5, {"prompt": MARK}, await cluster.consent_us())
        later = store.work("a", "distill-model")
        later.mkdir()
        store.erase("a", store.erased_us("a"))
        assert store.count("a") == 1 and later.exists()


def test_an_erasure_ends_a_distillation_that_a_script_has_started_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "_WATCH_S", 0.05)
    store = SampleStore(tmp_path)
    before = [(one, signal.getsignal(one)) for one in (signal.SIGINT, signal.SIGUSR1)]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), distill._reading(tmp_path, "a"):
            store.erase("a", ordered_us=1)
            for _ in range(1000):
                time.sleep(0.01)
    finally:
        for one, handler in before:
            signal.signal(one, handler)


async def test_a_deleted_tenant_leaves_nothing_and_the_next_one_of_its_name_is_another(cluster: Cluster) -> None:
    tenants, record = cluster.store.tenants, tenants_pb2.Tenant(name="a", samples=sp.SAMPLE_CONSENT_TEXT)
    await tenants.put([record], by="test")
    before = await tenants.get("a")
    record.pacing = tenants_pb2.PACING_CONSTANT
    await tenants.put([record], by="test")
    assert (await tenants.get("a")).id == before.id != ""
    async with cluster.target("one") as (_, here):
        async with cluster.target("two") as (_, away):
            for stub in (here, away):
                await answered(stub, await cluster.consent_us())
            await until(lambda: len(marked(cluster.directory)) == 2)
        old_us = await cluster.consent_us()
        deleted = await cluster.control.DeleteTenant(control_pb2.DeleteTenantRequest(name="a"), metadata=OPERATOR)
        [pending] = deleted.pending
        assert "two" in pending and not marked(cluster.directory / "one")
        await tenants.put([record], by="test")
        assert (await tenants.get("a")).id not in ("", before.id)
        # A request of the former tenant's key that some gateway still knows.
        await answered(here, old_us)
        store = SampleStore(cluster.directory / "one")
        assert store.count("a") == 0
        await answered(here, await cluster.consent_us(), number=2)
        await until(lambda: store.count("a") == 1)
    async with cluster.target("two"):
        assert not marked(cluster.directory / "two")
    with pytest.raises(Exception, match="no tenant"):
        await cluster.control.DeleteTenant(control_pb2.DeleteTenantRequest(name="b"), metadata=OPERATOR)


@pytest.mark.slow
async def test_all_that_a_distillation_makes_of_samples_is_private_and_goes_with_the_tenant(
    cluster: Cluster, tmp_path: Path
) -> None:
    await cluster.store.tenants.put([tenants_pb2.Tenant(name="a", samples=sp.SAMPLE_CONSENT_TEXT)], by="test")
    key, out, work = tmp_path / "key", tmp_path / "made" / "draft", tmp_path / "work"
    key.write_bytes(Fernet.generate_key())
    store = SampleStore(cluster.directory / "one", read_cipher(key))
    consent_us = await cluster.consent_us()
    for number in range(8):
        store.write("a", 0.5, {"prompt": [number, *MARK], "output": MARK * 4}, consent_us)
    command = ["distill", str(out), "--target-model", str(cluster.tiny), "--train-tokens", "1", "--layers", "0"]
    command += ["--from-samples", "a", "--samples-dir", str(store.directory), "--samples-key-file", str(key)]
    assert await asyncio.to_thread(run, [*command, "--work-dir", str(work)]) == ExitCode.OK
    assert {"draft.safetensors", "recipe.json"} <= {path.name for path in out.iterdir()}
    assert {"shard_0000.safetensors", "training-model.pt"} <= {path.name for path in work.iterdir()}
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.is_relative_to(cluster.directory)]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600} and not marked(tmp_path)
    async with cluster.target("one"):
        deleted = await cluster.control.DeleteTenant(control_pb2.DeleteTenantRequest(name="a"), metadata=OPERATOR)
    assert not deleted.pending and not out.exists() and not work.exists()
    left = [path for path in cluster.directory.rglob("*") if path.is_file()]
    assert {path.parent.name for path in left} == {".orders"}


def test_the_page_lists_all_that_is_derived_from_texts_and_what_erases_it() -> None:
    page = (Path(__file__).parents[3] / "docs/security.md").read_text()
    table = page.partition("### Erasure")[2].partition("| what | where | erased by |\n|---|---|---|\n")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.partition("\n\n")[0].splitlines()]
    assert {what: by.strip("`") for what, _, by in rows} == DERIVED


async def test_a_target_whose_volume_does_not_answer_serves_and_ends_and_the_order_waits_for_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster.target("one"):
        pass
    answers, locked = threading.Event(), SampleStore._locked

    def stuck(self: SampleStore, *arguments: Any) -> Any:
        answers.wait()
        return locked(self, *arguments)

    monkeypatch.setattr(SampleStore, "_locked", stuck)
    monkeypatch.setattr("outrider.target.samples._START_S", 0.1)
    monkeypatch.setattr("outrider.target.samples._CLOSE_S", 0.1)
    monkeypatch.setattr("outrider_controller.control.api.history._TIMEOUT_S", 0.5)
    async with cluster.target("one") as (_, stub):
        await answered(stub, await cluster.consent_us())
        assert len((await cluster.delete()).pending) == 2, "the target and its volume"
    answers.set()
    async with cluster.target("one"):
        await cluster.done()


async def test_a_volume_that_exists_no_more_is_not_waited_for(cluster: Cluster) -> None:
    async with cluster.target("lost"):
        pass
    [pending] = (await cluster.delete()).pending
    volume = control_pb2.DeleteVolumeRequest(volume_id=pending.split()[0])
    await cluster.control.DeleteVolume(volume, metadata=OPERATOR)
    assert await cluster.pending() == []


async def test_the_time_of_a_record_is_of_the_stores_clock_and_is_not_stored_with_it(cluster: Cluster) -> None:
    tenant = tenants_pb2.Tenant(name="default", samples=sp.SAMPLE_CONSENT_TEXT)
    await cluster.store.tenants.put([tenant], by="test")
    found = await cluster.store.tenants.find(None)
    assert found is not None and found.tenant is not None
    first = await cluster.store.erasures.order("default", samples=True, by="test")
    second = await cluster.store.erasures.order("other", samples=True, by="test")
    assert found.tenant.read_unix_us < first.at_us < second.at_us
    assert (await cluster.store.tenants.get("default")).read_unix_us == 0
    [change] = await cluster.store.tenants.put([found.tenant], by="test")
    assert change.version == found.tenant.version


def test_orders_of_a_tenant_are_not_those_of_one_whose_name_begins_so(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    for tenant in ("a", "a-1", "a.b"):
        store.write(tenant, 0.5, {"n": 1}, 100)
    assert store.erase("a", 200) == 1
    assert [store.count(tenant) for tenant in ("a", "a-1", "a.b")] == [0, 1, 1]
    assert store.erased_us("a") == 200 and store.erased_us("a-1") == 0
    # An order that comes late does not take the place of a later one.
    store.erase("a", 150)
    store.write("a", 0.5, {"n": 1}, 160)
    assert store.count("a") == 0
