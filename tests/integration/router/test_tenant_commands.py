"""outrider apply, create key, get, revoke: against a real control plane, and what they say of bad input."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from outrider.metadata import MetadataStore
from outrider.metadata.tenants.ledger import SourceSums, TenantUsage
from outrider.rpc.v1 import tenants_pb2
from outrider_controller.cli.app import run
from outrider_controller.cli.change.tenants_file import read_tenants
from outrider_controller.cli.exits import CommandError
from outrider_controller.control.config import ControlConfig
from outrider_controller.control.server import running_control

GOOD = """
tenants:
- name: acme
  models: [m]
  weight: 2
  receipts: true
  quota: {requests_per_second: 1.5, tokens_per_minute: 600, concurrent_requests: 3}
- name: other
"""


@pytest.fixture
def control(metadata_url: str) -> Iterator[str]:
    """Its address. In a thread: commands run event loops of their own."""
    started, stop = threading.Event(), threading.Event()
    address: list[str] = []

    async def serve() -> None:
        async with MetadataStore.connect(metadata_url, call_timeout_s=5.0) as store:
            for tenant in (await store.tenants.page("", 1000))[0]:
                await store.tenants.delete(tenant.name, by="test")
            async with running_control(ControlConfig(), store) as life:
                address.append(life.address)
                started.set()
                await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(60)
    yield address[0]
    stop.set()
    thread.join()


def command(control: str, *arguments: str) -> int:
    return run([*arguments, "--control", control])


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "tenants.yaml"
    file.write_text(text)
    return file


def test_a_file_is_applied_and_applied_again_changes_nothing(
    control: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write(tmp_path, GOOD))
    for change in ("created", "unchanged"):
        assert command(control, "apply", "-f", file, "-o", "json") == 0
        changes = json.loads(capsys.readouterr().out)["tenants"]
        assert [(row["name"], row["change"]) for row in changes] == [("acme", change), ("other", change)]
    assert command(control, "get", "tenants", "acme", "-o", "json") == 0
    (row,) = json.loads(capsys.readouterr().out)["tenants"]
    assert (row["weight"], row["models"], row["requests_per_second"]) == (2.0, ["m"], 1.5)
    assert row["receipts"] is True
    assert command(control, "get", "tenants", "nobody") == 3


def test_a_model_that_no_target_has_is_told(control: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(control, "apply", "-f", str(write(tmp_path, GOOD))) == 0
    assert "acme: models: no target has m now; there are: none" in capsys.readouterr().err


def test_a_key_is_printed_once_listed_and_revoked(
    control: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(control, "apply", "-f", str(write(tmp_path, GOOD)))
    capsys.readouterr()
    assert command(control, "create", "key", "acme", "--scope", "infer", "--expires", "1d", "-o", "json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["key"].startswith("ork-")
    assert command(control, "get", "keys", "--tenant", "acme") == 0
    listed = capsys.readouterr().out
    assert made["id"] in listed and made["key"] not in listed
    assert command(control, "get", "key", made["id"], "-o", "wide") == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["ID", "TENANT", "SCOPES", "EXPIRES", "VALID", "CREATED"]
    assert command(control, "get", "keys", made["id"], "nobody") == 3
    assert command(control, "revoke", "key", made["id"]) == 2
    assert "--yes" in capsys.readouterr().err
    assert command(control, "describe", "keys", made["id"], "-o", "yaml") == 0
    assert yaml.safe_load(capsys.readouterr().out)["key"]["scopes"] == ["infer"]
    assert command(control, "revoke", "key", made["id"], "--yes") == 0
    assert command(control, "revoke", "key", made["id"], "--yes") == 3
    assert command(control, "create", "key", "nobody") == 3
    assert command(control, "create", "key", "acme", "--expires", "soon") == 2


def test_files_and_stdin_are_applied_together_or_not_at_all(
    control: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = str(write(tmp_path, GOOD))

    def apply(stdin: str) -> subprocess.CompletedProcess[str]:
        start = (sys.executable, "-m", "outrider_controller.cli", "apply", "--control", control, "-o", "name")
        return subprocess.run([*start, "-f", first, "-f", "-"], input=stdin, capture_output=True, text=True, timeout=60)

    assert apply("tenants: [{name: piped}, {name: acme}]").returncode == 2
    assert "not a field" in apply("tenants: [{nam: piped}]").stderr
    assert command(control, "get", "tenants", "-o", "name") == 0
    assert capsys.readouterr().out == ""
    assert apply("tenants: [{name: piped}]").stdout.split() == ["acme", "other", "piped"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tenants: [{name: a, colour: red}]", "tenants[0]: 'colour' is not a field"),
        ("tenants: [{name: a}, {name: a}]", "tenants[1].name: a is already at tenants[0]"),
        ("tenants: [{name: a, quota: {requests_per_second: -1}}]", "tenants[0].quota.requests_per_second"),
        ("tenants: [{name: a, quota: {tokens_per_minute: -1}}]", "tenants[0].quota.tokens_per_minute"),
        ("tenants: [{name: a, quota: {tokens_per_minute: 0}}]", "tenants[0].quota.tokens_per_minute"),
        ("tenants: [{name: a, weight: 0}]", "tenants[0].weight: 0 is below 0.01"),
        ("tenants: [{name: a, speculation: {weight: 0.0}}]", "tenants[0].speculation.weight: 0 is below 0.01"),
        ("tenants: [{name: a, quota: {tokens_per_minute: many}}]", "tenants[0].quota.tokens_per_minute"),
        ('tenants: [{name: "a\\x07"}]', "tenants[0].name"),
        ("tenants: [{name: a, models: [1]}]", "tenants[0].models[0]"),
        ("tenants: [{name: true}]", "tenants[0].name"),
        ("tenants: [{quota: {}}]", "tenants[0].name"),
        ("tenants: {a: 1}", "tenants: \"{'a': 1}\" is not a list"),
        ("tenants: [", "line 2: not valid YAML"),
        ("- a", "has to be a mapping"),
        ("", "tenants: is missing"),
        ("tenants: [{name: a, quota: {}, quota: {}}]", "line 1: quota: is repeated"),
        ("tenant: []", "'tenant' is not a field"),
        ("tenants: []", "tenants: 0 tenants"),
    ],
)
def test_a_bad_file_is_refused_by_file_and_field_and_nothing_of_it_is_applied(
    control: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = write(tmp_path, text)
    assert command(control, "apply", "-f", str(file)) == 2
    error = capsys.readouterr().err
    assert str(file) in error and said in error and len(error.splitlines()) == 1
    assert command(control, "get", "tenants", "-o", "name") == 0
    assert capsys.readouterr().out == ""


def test_a_million_tenants_are_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants:\n" + "".join(f"- name: tenant-{number}\n" for number in range(1_000_000)))
    with pytest.raises(CommandError, match="at most 16777216 bytes"):
        read_tenants(file)


def test_what_the_file_says_is_what_is_sent(tmp_path: Path) -> None:
    quota: Any = tenants_pb2.Quota(requests_per_second=1.5, tokens_per_minute=600, concurrent_requests=3)
    acme = tenants_pb2.Tenant(name="acme", models=["m"], weight=2, quota=quota, receipts=True)
    assert read_tenants(write(tmp_path, GOOD)) == [acme, tenants_pb2.Tenant(name="other")]


def test_a_quota_is_changed_bound_by_bound(control: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(control, "apply", "-f", str(write(tmp_path, GOOD)))
    changes = ("--tokens-per-minute", "900", "--concurrent-requests", "none")
    capsys.readouterr()
    assert command(control, "set", "quota", "acme", *changes, "-o", "json") == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["requests_per_second"], row["tokens_per_minute"], row["concurrent_requests"]) == (1.5, 900, None)
    assert command(control, "set", "quota", "nobody", *changes) == 3
    assert command(control, "set", "quota", "acme", "--requests-per-second", "many") == 2
    assert "--requests-per-second" in capsys.readouterr().err
    assert command(control, "set", "quota", "acme") == 2


def test_speculation_is_set_and_explained(control: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(control, "set", "speculation", "acme", "off", "--ttl", "1h", "-o", "json") == 0
    row = json.loads(capsys.readouterr().out)
    assert row["setting"] == "off"
    assert row["until"]
    assert command(control, "explain", "acme", "-o", "json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["tenant"], said["known"]) == ("acme", False)
    assert command(control, "set", "speculation", "acme", "auto") == 0
    assert command(control, "set", "speculation", "acme", "sometimes") == 2
    assert command(control, "set", "speculation", "no name", "on") == 2
    assert command(control, "set", "speculation", "acme", "on", "--ttl", "soon") == 2


def test_a_pacing_that_is_none_is_refused(control: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(control, "apply", "-f", str(write(tmp_path, "tenants: [{name: even, pacing: constant}]"))) == 0
    assert command(control, "apply", "-f", str(write(tmp_path, "tenants: [{name: even, pacing: slow}]"))) == 2
    assert "tenants[0].pacing: 'slow' is none of off, constant" in capsys.readouterr().err


def test_usage_is_told_by_tenant_and_by_hour(
    control: str, metadata_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hour = int(time.time() // 3600)

    async def write() -> None:
        async with MetadataStore.connect(metadata_url, call_timeout_s=5.0) as store:
            for ago in (0, 1):
                used = TenantUsage(requests=2, output_tokens=7, target_useful_us=1_500_000, draft_wasted_us=-1)
                used.drafted("ngram", SourceSums(4, 3, 2, 250_000, 1_000))
                await store.ledger.write(hour - ago, "router-1", {"usage-1": used, "usage-2": used})
                said = TenantUsage(requests=1, output_tokens=999)
                await store.ledger.write(hour - ago, "attached:router-1", {"usage-1 target-7": said})

    asyncio.run(write())
    assert command(control, "get", "usage", "usage-1", "-o", "json") == 0
    row, of_server = json.loads(capsys.readouterr().out)["usage"]
    assert (row["tenant"], row["server"], row["requests"], row["output_tokens"]) == ("usage-1", "", 4, 14)
    assert [of_server[name] for name in ("tenant", "server", "output_tokens")] == ["usage-1", "target-7", 1998]
    tokens = {"drafted_tokens": 8, "verified_tokens": 6, "accepted_tokens": 4}
    assert row["sources"] == {"ngram": {**tokens, "target_s": 0.5, "draft_s": 0.002}}
    assert (row["target_s"], row["target_useful_s"], row["draft_wasted_s"]) == (3.0, 3.0, 0.0)
    assert command(control, "get", "usage", "--by", "hour", "--since", "3h", "-o", "wide") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("usage-")]
    own = [line for line in lines if "target-7" not in line]
    assert (len(lines), len(own)) == (6, 4) and all(" 1.5 " in line and "ngram 2/3 0.3 s" in line for line in own)
    assert command(control, "get", "usage", "--since", "100d") == 2
    assert "since_unix_s" in capsys.readouterr().err
    assert command(control, "get", "usage", "--since", "yesterday") == 2
    assert "30s, 10m, 12h or 90d" in capsys.readouterr().err
    assert command(control, "get", "usage", "-o", "name", "--by", "hour") == 0
    # Other tests share the store.
    assert {"usage-1", "usage-2"} <= set(capsys.readouterr().out.split())
    assert command(control, "describe", "usage", "usage-1", "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["usage"]["requests"], found["usage"]["target_wasted_share"], len(found["hours"])) == (4, 0.0, 2)
    assert command(control, "describe", "usage", "default") == 0
    assert ["Acceptance:", "-"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert command(control, "describe", "usage", "nobody") == 3


def test_the_audit_names_who_changed_which_field(
    control: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for weight in (2, 3):
        command(control, "apply", "-f", str(write(tmp_path, f"tenants: [{{name: audited, weight: {weight}}}]")))
    capsys.readouterr()
    assert command(control, "get", "audit", "audited", "-o", "json") == 0
    last, first = json.loads(capsys.readouterr().out)["audit"]
    assert (last["action"], last["change"], last["old"]["weight"], last["new"]["weight"]) == (
        "put tenant",
        "weight 2.0 → 3.0, version 2",
        2.0,
        3.0,
    )
    assert (first["old"], first["new"]["name"]) == (None, "audited")
    assert command(control, "get", "audit", "nobody") == 0
    for consent in ("text", "off"):
        command(control, "apply", "-f", str(write(tmp_path, f"tenants: [{{name: recorded, samples: {consent}}}]")))
    command(control, "apply", "-f", str(write(tmp_path, "tenants: [{name: recorded, samples: acceptance}]")))
    command(control, "delete", "tenant", "recorded", "--yes")
    capsys.readouterr()
    assert command(control, "get", "audit", "recorded", "-o", "json") == 0
    changes = [row["change"].split(",")[0] for row in json.loads(capsys.readouterr().out)["audit"]]
    assert changes == [
        "samples SAMPLE_CONSENT_ACCEPTANCE → -",
        "samples - → SAMPLE_CONSENT_ACCEPTANCE",
        "samples SAMPLE_CONSENT_TEXT → -",
        "samples - → SAMPLE_CONSENT_TEXT",
    ]
