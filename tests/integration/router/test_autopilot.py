"""`outrider autopilot` with a real control plane and a real metadata store. Training is replaced, and workers are
simulated."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import click
import pytest
from outrider.draft.config import parse_arguments
from outrider.metadata import MetadataStore
from outrider.metadata.events import EventKind
from outrider.rpc.v1 import control_pb2, sequence_pb2, tenants_pb2
from outrider.samples import SampleStore
from outrider_controller.cli.app import cli
from outrider_controller.cli.clusters.control import ask_control
from outrider_controller.cli.drafts import autopilot
from outrider_controller.cli.drafts.autopilot import AutopilotOptions, ClusterWorld
from outrider_controller.cli.drafts.releases import MIN_SAMPLES, Autopilot, Fallen, StepFailed
from outrider_controller.control.alerts.active import AlertKind

from tests.fakes import FakeDraft, serving_draft
from tests.integration.router.conftest import Cluster, Fleet, soon

Outrider = Callable[..., Any]
ALERT = {"alert": AlertKind.ACCEPTANCE_FELL.value, "tenant": "acme", "model": "tiny", "reason": "0.40, 0.60 before"}


class SimulatedWorker:
    """A draft worker of this model, a candidate."""

    def __init__(self, cluster: Cluster, model: str, **info: str) -> None:
        self._cluster, self._stack = cluster, AsyncExitStack()

        async def begin(fleet: Fleet) -> FakeDraft:
            draft = await self._stack.enter_async_context(serving_draft(FakeDraft(model=model, candidate=True, **info)))
            await self._stack.enter_async_context(fleet.store.register(draft.info, draft.address, lambda: draft.load))
            return draft

        self.draft = cluster.within(begin)
        self.running = True

    def poll(self) -> int | None:
        return None if self.running else 0

    def end(self) -> None:
        self.running = False
        self._cluster.within(lambda fleet: self._stack.aclose())


@pytest.fixture
def started(cluster: Cluster) -> dict[str, SimulatedWorker]:
    """By the name of the draft."""
    return {}


@pytest.fixture
def ran() -> list[Sequence[str]]:
    return []


@pytest.fixture
def world(
    cluster: Cluster,
    metadata_url: str,
    tmp_path: Path,
    started: dict[str, SimulatedWorker],
    ran: list[Sequence[str]],
) -> ClusterWorld:
    namespace = cluster.fleet.store._keys.namespace

    def run(arguments: Sequence[str], within_s: float, meanwhile: Callable[[], None]) -> str:
        meanwhile()
        ran.append(arguments)
        if arguments[0] == "distill":
            Path(arguments[arguments.index("--work-dir") + 1]).mkdir()
        return json.dumps({"drafts": [{"all": {"tokens_per_round": 1.5}}, {"all": {"tokens_per_round": 1.6}}]})

    def start(arguments: Sequence[str]) -> SimulatedWorker:
        name = Path(arguments[arguments.index("--model") + 1]).name
        return started.setdefault(name, SimulatedWorker(cluster, name))

    options = AutopilotOptions("tiny", SampleStore(tmp_path / "samples"), "", ("--train-tokens", "1000"), (), "cpu", 1)
    return ClusterWorld(
        cluster.control,
        options,
        lambda: MetadataStore.connect(metadata_url, namespace=namespace),
        run,
        start,
        SimulatedWorker.end,
    )


def pilot_of(world: ClusterWorld, tmp_path: Path) -> Autopilot:
    directory = tmp_path / "drafts"
    directory.mkdir(exist_ok=True)
    return Autopilot(world, directory, "shipped", budget_s=60.0)


def fell(cluster: Cluster, kind: EventKind = EventKind.ALERT_RAISED, **fields: str) -> None:
    cluster.within(lambda fleet: fleet.store.emit(kind, {**ALERT, **fields}))


def consent(world: ClusterWorld, tenant: str) -> None:
    record = tenants_pb2.Tenant(name=tenant, samples=sequence_pb2.SAMPLE_CONSENT_TEXT)
    ask_control(world.control, lambda stub: stub.PutTenants(control_pb2.PutTenantsRequest(tenants=[record])))
    for number in range(MIN_SAMPLES):
        world.options.samples.write(tenant, 0.1, {"prompt": [number], "output": [1]})


def test_a_release_goes_through_the_registry_and_each_step_is_an_event_and_in_the_audit(
    cluster: Cluster,
    outrider: Outrider,
    world: ClusterWorld,
    started: dict[str, SimulatedWorker],
    ran: list[Sequence[str]],
    tmp_path: Path,
) -> None:
    pilot = pilot_of(world, tmp_path)
    fell(cluster)
    pilot.turn()
    assert pilot.book.release is None and "samples: text" in pilot.held_back(world.fallen()[0])
    consent(world, "acme")
    pilot.turn()
    pilot.turn()
    pilot.turn()
    corpus = world.options.samples.of("acme") / "distill-1"
    assert [command[0] for command in ran] == ["distill", "compare"] and str(corpus) in ran[1]
    assert {"--from-samples", "acme", "--start", "shipped", "--train-tokens"} <= set(ran[0])

    # Another process goes on with it.
    again = pilot_of(world, tmp_path)

    def rolls() -> bool:
        again.turn()
        return outrider("rollout", "status", "acme-1", "-o", "json")["rollout"] is not None

    again.turn()
    soon(lambda: outrider("get", "drafts", "-o", "name") == "acme-1\n")
    soon(rolls)
    rollout = outrider("rollout", "status", "acme-1", "-o", "json")["rollout"]
    assert (rollout["tenant"], rollout["state"], rollout["share"], rollout["shadow_share"]) == (
        *("acme", "running"),
        *(0.03, 0.1),
    )
    again.turn()
    assert again.book.release is not None and corpus.exists()
    outrider("rollout", "promote", "acme-1")
    again.turn()
    assert again.book.release is None and again.book.promoted == {"acme": str(tmp_path / "drafts" / "acme-1")}
    assert not corpus.exists() and world.options.samples.count("acme") == MIN_SAMPLES
    pilot_of(world, tmp_path).turn()
    assert started["acme-1"].running and ran[2:] == []
    outrider("rollout", "undo", "acme-1")
    again.turn()
    assert not started["acme-1"].running and not again.book.promoted

    steps = ["distil", "compare", "rollout", "promoted"]
    events = outrider("events", "--kind", "autopilot_step", "-o", "json")["events"]
    assert [event["fields"]["step"] for event in events] == steps
    assert events[0]["fields"]["tenant"] == "acme" and "0.40, 0.60 before" in events[0]["fields"]["reason"]
    audit = outrider("get", "audit", "acme", "-o", "json")["audit"]
    noted = [entry for entry in audit[::-1] if entry["by"] == "autopilot"]
    assert [entry["action"] for entry in noted] == [f"autopilot {step}" for step in steps]
    assert noted[-1]["details"]["draft"] == "acme-1"


def test_a_draft_that_was_undone_has_no_worker_any_more(
    cluster: Cluster, outrider: Outrider, world: ClusterWorld, started: dict[str, SimulatedWorker], tmp_path: Path
) -> None:
    pilot = pilot_of(world, tmp_path)
    consent(world, "acme")
    fell(cluster)
    for _ in range(4):
        pilot.turn()
    soon(lambda: outrider("get", "drafts", "-o", "name") == "acme-1\n")

    def rolls() -> bool:
        pilot.turn()
        return outrider("rollout", "status", "acme-1", "-o", "json")["rollout"] is not None

    soon(rolls)
    outrider("rollout", "undo", "acme-1")
    pilot.turn()
    pilot.turn()
    assert not started["acme-1"].running and not pilot.book.promoted


def test_the_rollout_of_another_version_with_the_same_name_ends_no_release(
    cluster: Cluster, outrider: Outrider, world: ClusterWorld, tmp_path: Path
) -> None:
    earlier = SimulatedWorker(cluster, "acme-1", model_revision="0")
    soon(lambda: outrider("get", "drafts", "-o", "name") == "acme-1\n")
    outrider("rollout", "start", "acme-1")
    outrider("rollout", "promote", "acme-1")
    earlier.end()
    soon(lambda: outrider("get", "drafts", "-o", "json")["drafts"][0]["workers"] == 0)
    world.options = replace(world.options, share=0.2)
    pilot = pilot_of(world, tmp_path)
    consent(world, "acme")
    fell(cluster)
    for _ in range(3):
        pilot.turn()
    assert pilot.book.release is not None and world.rollout(pilot.book.release) is None

    pilot.turn()
    soon(lambda: len(outrider("get", "drafts", "-o", "json")["drafts"]) == 2)

    def rolls() -> bool:
        pilot.turn()
        return outrider("rollout", "status", "acme-1@1", "-o", "json")["rollout"] is not None

    soon(rolls)
    assert outrider("rollout", "status", "acme-1@1", "-o", "json")["rollout"]["share"] == 0.2
    assert pilot.book.release is not None and not pilot.book.promoted


def test_what_reads_the_samples_of_a_tenant_that_withdraws_its_consent_is_interrupted(
    cluster: Cluster, outrider: Outrider, world: ClusterWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pilot, begun = pilot_of(world, tmp_path), tmp_path / "begun"
    consent(world, "acme")
    fell(cluster)
    pilot.turn()
    interrupted = f"open({str(tmp_path / 'interrupted')!r}, 'w')"
    # Tests that a shell has started in the background ignore interrupts.
    taken = "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{taken}\ntry: open({str(begun)!r}, 'w'); time.sleep(600)\nexcept KeyboardInterrupt: {interrupted}"
    monkeypatch.setattr(autopilot, "_OUTRIDER", (sys.executable, "-c", program))
    monkeypatch.setattr(autopilot, "_PAUSE_S", 0.1)
    world.run = autopilot.run_command
    consents = world.consents

    def withdrawn(tenant: str) -> bool:
        if begun.exists():
            silent = tenants_pb2.Tenant(name=tenant)
            ask_control(world.control, lambda stub: stub.PutTenants(control_pb2.PutTenantsRequest(tenants=[silent])))
        return consents(tenant)

    monkeypatch.setattr(ClusterWorld, "consents", lambda self, tenant: withdrawn(tenant))
    pilot.turn()
    assert pilot.book.release is None and (tmp_path / "interrupted").exists()
    (event, *_) = outrider("events", "--kind", "autopilot_step", "-o", "json")["events"][::-1]
    assert event["fields"]["step"] == "ended" and "samples: text" in event["fields"]["reason"]


def test_a_command_that_ignores_interrupts_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    monkeypatch.setattr(autopilot, "_STOP_S", 0.1)
    with Popen([sys.executable, "-c", program], stdout=PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "\n"
        autopilot._interrupt(child)
        assert child.returncode == -signal.SIGTERM


def test_only_an_alert_that_is_up_about_this_target_counts(cluster: Cluster, world: ClusterWorld) -> None:
    fell(cluster)
    fell(cluster, tenant="other", model="another-model")
    fell(cluster, tenant="looping", alert=AlertKind.OUTPUT_LOOPS.value)
    fell(cluster, tenant="back")
    fell(cluster, EventKind.ALERT_CLEARED, tenant="back")
    soon(lambda: [one.tenant for one in world.fallen()] == ["acme"])
    fell(cluster, EventKind.ALERT_CLEARED)
    soon(lambda: not world.fallen())


def test_a_dry_run_says_what_it_would_do_and_does_nothing(
    cluster: Cluster, world: ClusterWorld, tmp_path: Path, outrider: Outrider, metadata_url: str
) -> None:
    pilot = pilot_of(world, tmp_path)
    fell(cluster)
    (row,) = autopilot.planned(pilot, world)
    assert row["step"] == "none" and "samples: text" in row["why"] and not row["commands"]
    consent(world, "acme")
    (row,) = autopilot.planned(pilot, world)
    assert row["step"] == "distil" and [line.split()[1] for line in row["commands"]] == [
        *("distill", "compare"),
        *("draft", "rollout"),
    ]
    command = ("autopilot", str(tmp_path / "new"), "--samples-dir", str(world.options.samples.directory), "--dry-run")
    told = outrider(*command, "--metadata", metadata_url, "--target-model", "tiny", "--draft", "shipped")
    assert "acme: distil: acceptance fell: 0.40, 0.60 before\n  outrider distill " in told
    assert "--train-tokens 400000" in told, "as much as two cores learn within --minutes"
    assert "give --draft" in outrider(*command, "--metadata", metadata_url, "--target-model", "tiny", code=2)
    assert not outrider("events", "--kind", "autopilot_step", "-o", "json")["events"]


def test_the_commands_that_it_runs_are_commands(world: ClusterWorld, tmp_path: Path) -> None:
    consent(world, "acme")
    (world.options.samples.of("acme") / "distill-1").mkdir()
    release = pilot_of(world, tmp_path).next_release(Fallen("acme", "", consents=True, num_samples=100))
    for arguments in world.options.commands(release):
        command: click.Command | None = cli
        while isinstance(command, click.Group):
            name, command, arguments = command.resolve_command(click.Context(command), arguments)
        assert command is not None
        # Raises for an option that the command has not.
        command.make_context(name, arguments)
    config = parse_arguments(world.options.worker(release.out)[1:])
    assert config.candidate and config.model == release.out
    with_address = replace(world.options, draft_args=("--listen", "127.0.0.1:9003"))
    assert parse_arguments(with_address.worker(release.out)[1:]).listen == "127.0.0.1:9003"


@pytest.mark.parametrize(("within_s", "message"), [(0.2, "took more than"), (60.0, "exit code 3")])
def test_a_command_that_fails_or_takes_too_long_ends_its_step(
    monkeypatch: pytest.MonkeyPatch, within_s: float, message: str
) -> None:
    program = "import sys, time; time.sleep(100 if sys.argv[1] == '0.2' else 0); sys.exit(3)"
    monkeypatch.setattr(autopilot, "_OUTRIDER", (sys.executable, "-c", program))
    with pytest.raises(StepFailed, match=message):
        autopilot.run_command([str(within_s)], within_s, lambda: None)
