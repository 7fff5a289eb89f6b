"""outrider apply, create key, get, revoke: against a real control plane, and what they say of bad input."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from outrider.metadata.tenants.ledger import SourceSums, TenantUsage
from outrider.rpc.v1 import tenants_pb2
from outrider_controller.cli.app import run
from outrider_controller.cli.change.tenants_file import read_tenants
from outrider_controller.cli.exits import CommandError

from tests.integration.router.conftest import Cluster, Fleet

Outrider = Callable[..., Any]
GOOD = """
tenants:
- name: acme
  models: [m]
  weight: 2
  receipts: true
  quota: {requests_per_second: 1.5, tokens_per_minute: 600, concurrent_requests: 3}
- name: other
"""


def write(tmp_path: Path, text: str = GOOD) -> str:
    file = tmp_path / "tenants.yaml"
    file.write_text(text)
    return str(file)


def test_a_file_is_applied_and_applied_again_changes_nothing(outrider: Outrider, tmp_path: Path) -> None:
    for change in ("created", "unchanged"):
        changes = outrider("apply", "-f", write(tmp_path), "-o", "json")["tenants"]
        assert [(row["name"], row["change"]) for row in changes] == [("acme", change), ("other", change)]
    [row] = outrider("get", "tenants", "acme", "-o", "json")["tenants"]
    assert (row["weight"], row["models"], row["requests_per_second"], row["receipts"]) == (2.0, ["m"], 1.5, True)
    outrider("get", "tenants", "nobody", code=3)


def test_a_model_that_no_target_has_is_told(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["apply", "-f", write(tmp_path), "--control", cluster.control]) == 0
    assert "acme: models: no target has m now; there are: none" in capsys.readouterr().err


def test_a_key_is_printed_once_listed_and_revoked(outrider: Outrider, tmp_path: Path) -> None:
    outrider("apply", "-f", write(tmp_path))
    made = outrider("create", "key", "acme", "--scope", "infer", "--expires", "1d", "-o", "json")
    assert made["key"].startswith("ork-")
    listed = outrider("get", "keys", "--tenant", "acme")
    assert made["id"] in listed and made["key"] not in listed
    titles = outrider("get", "key", made["id"], "-o", "wide").splitlines()[0]
    assert titles.split() == ["ID", "TENANT", "SCOPES", "EXPIRES", "VALID", "CREATED"]
    outrider("get", "keys", made["id"], "nobody", code=3)
    assert "--yes" in outrider("revoke", "key", made["id"], code=2)
    assert yaml.safe_load(outrider("describe", "keys", made["id"], "-o", "yaml"))["key"]["scopes"] == ["infer"]
    for code in (0, 3):
        outrider("revoke", "key", made["id"], "--yes", code=code)
    outrider("create", "key", "nobody", code=3)
    outrider("create", "key", "acme", "--expires", "soon", code=2)


def test_files_and_stdin_are_applied_together_or_not_at_all(
    cluster: Cluster, outrider: Outrider, tmp_path: Path
) -> None:
    first = write(tmp_path)

    def apply(stdin: str) -> subprocess.CompletedProcess[str]:
        start = (sys.executable, "-m", "outrider_controller.cli", "apply", "--control", cluster.control, "-o", "name")
        return subprocess.run([*start, "-f", first, "-f", "-"], input=stdin, capture_output=True, text=True, timeout=60)

    assert apply("tenants: [{name: piped}, {name: acme}]").returncode == 2
    assert "not a field" in apply("tenants: [{nam: piped}]").stderr
    assert outrider("get", "tenants", "-o", "name") == ""
    assert apply("tenants: [{name: piped}]").stdout.split() == ["acme", "other", "piped"]


BAD = [
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
]


def test_a_bad_file_is_refused_by_file_and_field_and_nothing_of_it_is_applied(
    outrider: Outrider, tmp_path: Path
) -> None:
    for text, said in BAD:
        file = write(tmp_path, text)
        error = outrider("apply", "-f", file, code=2)
        assert file in error and said in error and len(error.splitlines()) == 1
    assert outrider("get", "tenants", "-o", "name") == ""


def test_a_million_tenants_are_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants:\n" + "".join(f"- name: tenant-{number}\n" for number in range(1_000_000)))
    with pytest.raises(CommandError, match="at most 16777216 bytes"):
        read_tenants(file)


def test_what_the_file_says_is_what_is_sent(tmp_path: Path) -> None:
    quota: Any = tenants_pb2.Quota(requests_per_second=1.5, tokens_per_minute=600, concurrent_requests=3)
    acme = tenants_pb2.Tenant(name="acme", models=["m"], weight=2, quota=quota, receipts=True)
    assert read_tenants(Path(write(tmp_path))) == [acme, tenants_pb2.Tenant(name="other")]


def test_a_quota_is_changed_bound_by_bound(outrider: Outrider, tmp_path: Path) -> None:
    outrider("apply", "-f", write(tmp_path))
    changes = ("--tokens-per-minute", "900", "--concurrent-requests", "none")
    row = outrider("set", "quota", "acme", *changes, "-o", "json")
    assert (row["requests_per_second"], row["tokens_per_minute"], row["concurrent_requests"]) == (1.5, 900, None)
    outrider("set", "quota", "nobody", *changes, code=3)
    assert "--requests-per-second" in outrider("set", "quota", "acme", "--requests-per-second", "many", code=2)
    outrider("set", "quota", "acme", code=2)


def test_speculation_is_set_and_explained(outrider: Outrider) -> None:
    row = outrider("set", "speculation", "acme", "off", "--ttl", "1h", "-o", "json")
    assert row["setting"] == "off" and row["until"]
    said = outrider("explain", "acme", "-o", "json")
    assert (said["tenant"], said["known"]) == ("acme", False)
    outrider("set", "speculation", "acme", "auto")
    for bad in (("acme", "sometimes"), ("no name", "on"), ("acme", "on", "--ttl", "soon")):
        outrider("set", "speculation", *bad, code=2)


def test_a_pacing_that_is_none_is_refused(outrider: Outrider, tmp_path: Path) -> None:
    outrider("apply", "-f", write(tmp_path, "tenants: [{name: even, pacing: constant}]"))
    error = outrider("apply", "-f", write(tmp_path, "tenants: [{name: even, pacing: slow}]"), code=2)
    assert "tenants[0].pacing: 'slow' is none of off, constant" in error


def test_usage_is_told_by_tenant_and_by_hour(cluster: Cluster, outrider: Outrider) -> None:
    hour = int(time.time() // 3600)

    async def write(fleet: Fleet) -> None:
        for ago in (0, 1):
            used = TenantUsage(requests=2, output_tokens=7, target_useful_us=1_500_000, draft_wasted_us=-1)
            used.drafted("ngram", SourceSums(4, 3, 2, 250_000, 1_000))
            await fleet.store.ledger.write(hour - ago, "router-1", {"usage-1": used, "usage-2": used})
            said = TenantUsage(requests=1, output_tokens=999)
            await fleet.store.ledger.write(hour - ago, "attached:router-1", {"usage-1 target-7": said})

    cluster.within(write)
    row, of_server = outrider("get", "usage", "usage-1", "-o", "json")["usage"]
    assert (row["tenant"], row["server"], row["requests"], row["output_tokens"]) == ("usage-1", "", 4, 14)
    assert [of_server[name] for name in ("tenant", "server", "output_tokens")] == ["usage-1", "target-7", 1998]
    tokens = {"drafted_tokens": 8, "verified_tokens": 6, "accepted_tokens": 4}
    assert row["sources"] == {"ngram": {**tokens, "target_s": 0.5, "draft_s": 0.002}}
    assert (row["target_s"], row["target_useful_s"], row["draft_wasted_s"]) == (3.0, 3.0, 0.0)
    told = outrider("get", "usage", "--by", "hour", "--since", "3h", "-o", "wide").splitlines()
    lines = [line for line in told if line.startswith("usage-")]
    own = [line for line in lines if "target-7" not in line]
    assert (len(lines), len(own)) == (6, 4) and all(" 1.5 " in line and "ngram 2/3 0.3 s" in line for line in own)
    assert "since_unix_s" in outrider("get", "usage", "--since", "100d", code=2)
    assert "30s, 10m, 12h or 90d" in outrider("get", "usage", "--since", "yesterday", code=2)
    assert set(outrider("get", "usage", "-o", "name", "--by", "hour").split()) == {"usage-1", "usage-2"}
    found = outrider("describe", "usage", "usage-1", "-o", "json")
    assert (found["usage"]["requests"], found["usage"]["target_wasted_share"], len(found["hours"])) == (4, 0.0, 2)
    # The tenant that always is has asked nothing.
    assert ["Acceptance:", "-"] in [line.split() for line in outrider("describe", "usage", "default").splitlines()]
    outrider("describe", "usage", "nobody", code=3)


def test_the_audit_names_who_changed_which_field(outrider: Outrider, tmp_path: Path) -> None:
    for weight in (2, 3):
        outrider("apply", "-f", write(tmp_path, f"tenants: [{{name: audited, weight: {weight}}}]"))
    last, first = outrider("get", "audit", "audited", "-o", "json")["audit"]
    assert (last["action"], last["change"]) == ("put tenant", "weight 2.0 → 3.0, version 2")
    assert (last["old"]["weight"], last["new"]["weight"]) == (2.0, 3.0)
    assert (first["old"], first["new"]["name"]) == (None, "audited")
    # The limit is of what is named, whatever came later.
    assert outrider("get", "audit", "audited", "--limit", "1", "-o", "json")["audit"] == [last]
    outrider("apply", "-f", write(tmp_path, "tenants: [{name: later}]"))
    assert outrider("get", "audit", "audited", "--limit", "1", "-o", "json")["audit"] == [last]
    outrider("get", "audit", "nobody")
    for consent in ("text", "off", "acceptance"):
        outrider("apply", "-f", write(tmp_path, f"tenants: [{{name: recorded, samples: {consent}}}]"))
    outrider("delete", "tenant", "recorded", "--yes")
    changes = [row["change"].split(",")[0] for row in outrider("get", "audit", "recorded", "-o", "json")["audit"]]
    assert changes == [
        "samples SAMPLE_CONSENT_ACCEPTANCE → -",
        "samples - → SAMPLE_CONSENT_ACCEPTANCE",
        "samples SAMPLE_CONSENT_TEXT → -",
        "samples - → SAMPLE_CONSENT_TEXT",
    ]
