"""Releases a new draft for each tenant whose acceptance fell, with the commands of the manual and their JSON.

    python release_drafts.py DIRECTORY --samples-dir DIR --metadata URL [--target-model NAME] [--draft NAME]

Each turn reads the alerts. For a tenant with `acceptance_fell` and `samples: text` it distils a draft from the tenant's
samples, compares it with the draft in use on samples that were held out, and, if it is better, starts a worker and a
rollout, which the evidence promotes or undoes. DIRECTORY keeps the drafts: one that is there is not made again.
An example to copy: it takes one tenant at a time, and the workers end with it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIN_GAIN = 0.01
"""Rounds a token that a new draft has to save on the held-out samples."""
MAX_EVENTS = 10_000
PAUSE_S = 5.0


def outrider(*arguments: str) -> Any:
    """What a command says as JSON. Raises CalledProcessError."""
    command = ["outrider", *arguments, "-o", "json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


@dataclass
class Releases:
    """One tenant's release after the other."""

    directory: Path
    samples_dir: Path
    metadata: str
    target_model: str
    draft: str
    distill_args: list[str]
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """By the name of their draft."""

    def fallen(self) -> Iterator[str]:
        """Tenants that consent to samples with text, and whose acceptance fell."""
        consent = {each["name"] for each in outrider("get", "tenants")["tenants"] if each["samples"] == "text"}
        up: dict[str, bool] = {}
        for event in outrider("events", "--limit", str(MAX_EVENTS))["events"]:
            if event["fields"].get("alert") == "acceptance_fell":
                up[event["fields"]["tenant"]] = event["kind"] == "alert_raised"
        return (tenant for tenant, is_up in up.items() if is_up and tenant in consent)

    def turn(self) -> None:
        for tenant in self.fallen():
            name = f"{tenant}-{time.strftime('%Y-%m-%d')}"
            # At most one a day for a tenant.
            if not (self.directory / name).exists():
                self.release(tenant, name)

    def release(self, tenant: str, name: str) -> None:
        out, corpus = str(self.directory / name), str(self.directory / f"{name}-corpus")
        common = ["--target-model", self.target_model]
        recorded = ["--from-samples", tenant, "--samples-dir", str(self.samples_dir), "--work-dir", corpus]
        command = ["outrider", "distill", out, *common, "--start", self.draft, *recorded, *self.distill_args]
        subprocess.run(command, check=True)
        before, new = (
            each["all"]["tokens_per_round"]
            for each in outrider("compare", "drafts", self.draft, out, *common, "--held-out", corpus)["drafts"]
        )
        print(f"{name}: {new:.2f} tokens a round, {before:.2f} with {self.draft}", flush=True)
        if 1 / before - 1 / new < MIN_GAIN:
            return
        # `distill --adapter` makes an adapter of the draft in use.
        is_adapter = Path(out, "adapter_config.json").is_file()
        model = ["--model", self.draft, "--adapters", out, "--model-name", name] if is_adapter else ["--model", out]
        command = ["outrider", "draft", *model, "--candidate", "--listen", "127.0.0.1:0"]
        self.workers[name] = subprocess.Popen([*command, "--metadata", self.metadata])
        while not any(each["name"] == name and each["workers"] for each in outrider("get", "drafts")["drafts"]):
            if self.workers[name].poll() is not None:
                raise SystemExit(f"{name}: its worker has ended")
            time.sleep(PAUSE_S)
        outrider("rollout", "start", name, "--tenant", tenant)
        while (rollout := outrider("rollout", "status", name)["rollout"])["state"] == "running":
            time.sleep(PAUSE_S)
        print(f"{name}: {rollout['state']}: {rollout['reason']}", flush=True)
        if rollout["state"] != "promoted":
            self.workers.pop(name).terminate()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, help="of the new drafts")
    parser.add_argument("--samples-dir", type=Path, required=True, help="as in the targets' --samples")
    parser.add_argument("--metadata", required=True, help="Redis, for the new workers")
    parser.add_argument("--target-model", default="smollm2-135m-instruct")
    parser.add_argument("--draft", default="smollm2-135m-draft", help="the one in use, from which a new one is learnt")
    parser.add_argument("--once", action="store_true", help="end after one turn")
    known, distill_args = parser.parse_known_args()
    known.directory.mkdir(parents=True, exist_ok=True)
    releases = Releases(
        known.directory, known.samples_dir, known.metadata, known.target_model, known.draft, distill_args
    )
    try:
        releases.turn()
        while not known.once:
            time.sleep(PAUSE_S)
            releases.turn()
    finally:
        for worker in releases.workers.values():
            worker.terminate()


if __name__ == "__main__":
    main()
