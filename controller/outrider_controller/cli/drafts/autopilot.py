"""outrider autopilot: does what an operator does with distill, compare and rollout. A long step is that command, in a
process of its own. `releases` decides.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

import click
from outrider.errors import Unavailable
from outrider.metadata import MetadataStore
from outrider.metadata.events import MAX_EVENTS, EventKind
from outrider.model_names import served_name
from outrider.rpc.v1 import control_pb2, drafts_pb2, sequence_pb2
from outrider.runtime.spawn import bound_to_us
from outrider.samples import SampleStore

from outrider_controller.autoscaler.rollout import DEFAULT_SHADOW_SHARE, DEFAULT_SHARE, MAX_SHARE
from outrider_controller.cli.asking import NumberRange
from outrider_controller.cli.change.tenants import all_tenants
from outrider_controller.cli.clusters.control import Control, ask_control, control_options
from outrider_controller.cli.drafts.releases import Autopilot, Fallen, Release, StepFailed
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import emit, note
from outrider_controller.cli.show.watching import repeated
from outrider_controller.cli.up.models import DEFAULT_TARGET, shipped_draft
from outrider_controller.control.alerts.active import AlertKind

_PAUSE_S = 5.0
_STOP_S = 40.0
_BY = "autopilot"
_OUTRIDER = (sys.executable, "-m", "outrider_controller.cli")
_WITHDRAWN = (drafts_pb2.ROLLOUT_STATE_UNDONE, drafts_pb2.ROLLOUT_STATE_GIVEN_UP)
_DIRECTORY = click.Path(file_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class AutopilotOptions:
    """Of the commands that it runs."""

    target_model: str
    samples: SampleStore
    samples_key_file: str
    distill_args: tuple[str, ...]
    draft_args: tuple[str, ...]
    device: str
    threads: int
    share: float = DEFAULT_SHARE
    """Of the tenant's requests, as `outrider rollout start` says."""

    def commands(self, release: Release) -> Iterator[list[str]]:
        """distill, compare, the draft worker and the rollout, as an operator types them."""
        corpus = str(self.samples.of(release.tenant) / f"distill-{release.number}")
        common = ["--target-model", self.target_model, "--device", self.device, "--threads", str(self.threads)]
        recorded = ["--from-samples", release.tenant, "--samples-dir", str(self.samples.directory)]
        key = ["--samples-key-file", self.samples_key_file] if self.samples_key_file else []
        start = ["--start", release.in_use, "--work-dir", corpus]
        yield ["distill", release.out, *common, *start, *recorded, *key, *self.distill_args]
        yield ["compare", "drafts", release.in_use, release.out, *common, "--held-out", corpus, "-o", "json"]
        yield self.worker(release.out)
        yield ["rollout", "start", release.name, "--tenant", release.tenant, "--share", f"{self.share:g}"]

    def worker(self, draft: str) -> list[str]:
        listen = [] if "--listen" in self.draft_args else ["--listen", "127.0.0.1:0"]
        return ["draft", "--model", draft, "--candidate", *listen, *self.draft_args]


def run_command(arguments: Sequence[str], within_s: float, meanwhile: Callable[[], None]) -> str:
    """What a command of ours prints. `meanwhile` is called at once and every few seconds, and may raise. Raises
    StepFailed. What interrupts us interrupts the command, so that it keeps its work."""
    name, ends_s = f"outrider {arguments[0]}", time.monotonic() + within_s
    with Popen(bound_to_us([*_OUTRIDER, *arguments]), stdout=PIPE, text=True, start_new_session=True) as child:
        try:
            meanwhile()
            while (out := _printed(child, max(0.0, min(_PAUSE_S, ends_s - time.monotonic())))) is None:
                if time.monotonic() >= ends_s:
                    raise StepFailed(f"{name} took more than the {within_s:.0f} s that were left")
                meanwhile()
        except BaseException:
            _interrupt(child)
            raise
    if child.returncode:
        raise StepFailed(f"{name} ended with exit code {child.returncode}")
    return out


def _interrupt(child: Popen[str]) -> None:
    """Ends it otherwise where it ignores interrupts, as what a shell has started in the background does."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(_STOP_S)
    except TimeoutExpired:
        stop_worker(child)


def _printed(child: Popen[str], within_s: float) -> str | None:
    """All of it, once the process has ended; None if it has not."""
    try:
        return child.communicate(timeout=within_s)[0]
    except TimeoutExpired:
        return None


def start_worker(arguments: Sequence[str]) -> Popen[str]:
    return Popen(bound_to_us([*_OUTRIDER, *arguments]), text=True, start_new_session=True)


def stop_worker(worker: Popen[str]) -> None:
    worker.terminate()
    try:
        worker.wait(_STOP_S)
    except TimeoutExpired:
        worker.kill()
        worker.wait()


@dataclass(slots=True)
class ClusterWorld:
    """A cluster, and this machine. A `World`."""

    control: str
    options: AutopilotOptions
    connect: Callable[[], MetadataStore]
    """To the metadata store of the cluster."""
    run: Callable[[Sequence[str], float, Callable[[], None]], str] = run_command
    start: Callable[[Sequence[str]], Any] = start_worker
    stop: Callable[[Any], None] = stop_worker
    _workers: dict[str, Any] = field(default_factory=dict)
    """By the directory of their draft."""

    def fallen(self) -> list[Fallen]:
        return ask_control(self.control, self._fallen)

    async def _fallen(self, stub: Control) -> list[Fallen]:
        up: dict[str, str] = {}
        kinds = [EventKind.ALERT_RAISED, EventKind.ALERT_CLEARED]
        async for response in stub.WatchEvents(control_pb2.WatchEventsRequest(last=MAX_EVENTS, kinds=kinds)):
            for event in response.events:
                fields = event.fields
                if (fields["alert"], fields["model"]) != (
                    AlertKind.ACCEPTANCE_FELL,
                    served_name(self.options.target_model),
                ):
                    continue
                up.pop(fields["tenant"], None)
                if event.kind == EventKind.ALERT_RAISED:
                    up[fields["tenant"]] = fields["reason"]
        consenting, count = await _consenting(stub), self.options.samples.count
        return [Fallen(name, reason, name in consenting, count(name)) for name, reason in up.items()]

    def consents(self, tenant: str) -> bool:
        return tenant in ask_control(self.control, _consenting)

    def distil(self, release: Release, within_s: float, meanwhile: Callable[[], None]) -> None:
        command, *_ = self.options.commands(release)
        self.run(command, within_s, meanwhile)

    def compare(self, release: Release, meanwhile: Callable[[], None]) -> tuple[float, float]:
        _, command, *_ = self.options.commands(release)
        before, new, *_ = json.loads(self.run(command, math.inf, meanwhile))["drafts"]
        return new["all"]["tokens_per_round"], before["all"]["tokens_per_round"]

    def keep_workers(self, drafts: Collection[str]) -> None:
        for draft in self._workers.keys() - set(drafts):
            self.stop(self._workers.pop(draft))
        for draft in drafts:
            if draft not in self._workers or self._workers[draft].poll() is not None:
                self._workers[draft] = self.start(self.options.worker(draft))

    def rollout(self, release: Release) -> drafts_pb2.Rollout | None:
        found = self._versions().get(release.name, drafts_pb2.DraftVersion())
        # While its worker starts again, the rollout goes on. Another one's of that name ends nothing.
        if found.rollout.state == drafts_pb2.ROLLOUT_STATE_RUNNING:
            return found.rollout
        if not found.num_workers:
            return None
        if found.HasField("rollout"):
            return found.rollout
        request = control_pb2.StartRolloutRequest(
            draft=found.version,
            tenant=release.tenant,
            share=self.options.share,
            shadow_share=DEFAULT_SHADOW_SHARE,
        )
        return ask_control(self.control, lambda stub: stub.StartRollout(request)).rollout

    def withdrawn(self) -> set[str]:
        return {name for name, one in self._versions().items() if one.num_workers and one.rollout.state in _WITHDRAWN}

    def _versions(self) -> dict[str, drafts_pb2.DraftVersion]:
        """By name: the version that a worker runs, the newest of several."""
        found = ask_control(self.control, lambda stub: stub.ListDrafts(control_pb2.ListDraftsRequest())).drafts
        order = sorted(found, key=lambda one: (bool(one.num_workers), one.first_seen_unix_ms))
        return {one.name: one for one in order}

    def note(self, release: Release) -> None:
        details = {"draft": release.name, "reason": release.reason}
        note(f"{release.tenant}: {release.step}: {release.reason}")
        try:
            asyncio.run(self._note(release.tenant, str(release.step), details))
        except Unavailable as error:
            raise CommandError.of(error, "metadata store") from error

    async def _note(self, tenant: str, step: str, details: Mapping[str, str]) -> None:
        async with self.connect() as store:
            await store.tenants.note(f"autopilot {step}", tenant, by=_BY, **details)
            await store.emit(EventKind.AUTOPILOT_STEP, {"tenant": tenant, "step": step, **details})

    def clear(self, release: Release) -> None:
        shutil.rmtree(self.options.samples.of(release.tenant) / f"distill-{release.number}", ignore_errors=True)


async def _consenting(stub: Control) -> set[str]:
    """The tenants whose record allows samples with text."""
    return {one.name for one in await all_tenants(stub) if one.samples == sequence_pb2.SAMPLE_CONSENT_TEXT}


@click.command("autopilot")
@click.argument("directory", type=_DIRECTORY)
@click.option("--samples-dir", type=_DIRECTORY, required=True, metavar="DIR", help="As in the targets' --samples.")
@click.option("--samples-key-file", default="", metavar="FILE", help="The targets' option of this name.")
@click.option("--target-model", default=DEFAULT_TARGET, show_default=True, metavar="PATH|NAME", help="The teacher.")
@click.option("--draft", default="", metavar="PATH|NAME", help="The draft in use; default: the one shipped.")
@click.option("--minutes", type=NumberRange(0, min_open=True), default=60.0, show_default=True, help="To distil.")
@click.option(
    "--distill-args",
    # What `outrider distill` learns by default takes two cores without AMX longer than --minutes.
    default="--train-tokens 400000",
    show_default=True,
    metavar="ARGS",
    help="More options of `outrider distill`, in quotes.",
)
@click.option("--draft-args", default="", metavar="ARGS", help="More options of `outrider draft`, in quotes.")
@click.option(
    "--share",
    type=NumberRange(0, MAX_SHARE, min_open=True),
    default=DEFAULT_SHARE,
    show_default=True,
    metavar="PART",
    help="As of `outrider rollout start`, of the tenant's requests.",
)
@click.option("--device", default="cpu", show_default=True, metavar="DEVICE", help="To train on: cpu, cuda.")
@click.option("--threads", type=click.IntRange(0), default=0, metavar="N", help="Of torch; 0: its default.")
@click.option("--metadata", envvar="OUTRIDER_METADATA", show_envvar=True, required=True, metavar="URL", help="Redis.")
@click.option("--dry-run", is_flag=True, help="Say what it would do now, and end.")
@control_options("text", "json")
def autopilot(
    directory: Path,
    samples_dir: Path,
    samples_key_file: str,
    target_model: str,
    draft: str,
    minutes: float,
    distill_args: str,
    draft_args: str,
    share: float,
    device: str,
    threads: int,
    metadata: str,
    dry_run: bool,
    control: str,
    output: str,
) -> None:
    """Release new drafts where a tenant's acceptance fell, until Ctrl-C.

    While the alert acceptance_fell is up for a tenant that consents to samples with text, it distils a draft from
    these, compares it with the draft in use on samples that were held out, runs a worker of it, and starts its rollout,
    which the evidence promotes or undoes. One release at a time, and at most one a day for a tenant. Each step is an
    event and stands in the audit. DIRECTORY keeps the new drafts and where it is: started again, it goes on from there.
    """
    if not (draft := draft or shipped_draft(target_model)):
        raise click.UsageError(f"no draft is shipped for {target_model}: give --draft")
    directory.mkdir(parents=True, exist_ok=True)
    options = AutopilotOptions(
        target_model,
        SampleStore(samples_dir),
        samples_key_file,
        tuple(shlex.split(distill_args)),
        tuple(shlex.split(draft_args)),
        device,
        threads,
        share,
    )
    try:
        MetadataStore.connect(metadata)
    except ValueError as error:
        raise click.UsageError(f"--metadata: {error}") from None
    world = ClusterWorld(control, options, lambda: MetadataStore.connect(metadata))
    pilot = Autopilot(world, directory, draft, 60 * minutes)
    if dry_run:
        rows = list(planned(pilot, world))
        emit("autopilot", {"tenants": rows}, output, "\n".join(map(_line, rows)) or "no tenant's acceptance has fallen")
        return
    # For the workers: a password is refused in a flag.
    os.environ["OUTRIDER_METADATA"] = metadata
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (directory / "autopilot.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"another autopilot works in {directory}", ExitCode.CONFLICT) from None
        try:
            for _ in repeated(pilot.turn, _PAUSE_S, begun=lambda: bool(pilot.book.number)):
                pass
        finally:
            world.keep_workers(())


def planned(pilot: Autopilot, world: ClusterWorld) -> Iterator[dict[str, Any]]:
    """What it does, and would do for each tenant whose acceptance has fallen."""
    if (now := pilot.book.release) is not None:
        yield {"tenant": now.tenant, "step": str(now.step), "why": now.reason, "commands": []}
    for fallen in world.fallen():
        release, why = pilot.next_release(fallen), pilot.held_back(fallen)
        commands = [] if why else [shlex.join(["outrider", *one]) for one in world.options.commands(release)]
        yield {
            "tenant": fallen.tenant,
            "step": "none" if why else str(release.step),
            "why": why or release.reason,
            "commands": commands,
        }


def _line(row: Mapping[str, Any]) -> str:
    return "\n  ".join([f"{row['tenant']}: {row['step']}: {row['why']}", *row["commands"]])
