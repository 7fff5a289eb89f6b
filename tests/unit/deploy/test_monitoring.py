"""Rules and dashboards ask for what there is; alerts fire where they should, as promtool sees it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from outrider.errors import Code, OutriderError

from tests.unit.deploy.chart import CHART, PROFILES, RAY_MODES, of_kind, profile, rendered

MONITORING = CHART / "monitoring"
METRICS = Path(__file__).parents[3] / "docs/metrics.md"
OPERATIONS = METRICS.with_name("operations.md")
DASHBOARDS = sorted((MONITORING / "dashboards").glob("*.json"))
# What Prometheus and its operator add to every series.
_ADDED = {"pod", "namespace", "instance", "job", "le"}

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Prometheus")


@cache
def known() -> dict[str, set[str]]:
    """Metrics as docs/metrics.md lists them, which is held against the code, with their labels."""
    found = {}
    for line in METRICS.read_text().splitlines():
        if line.startswith("| `outrider_"):
            name, _, labels = line.split("|")[1:4]
            found[name.strip(" `")] = set(re.findall(r"`(\w+)`", labels))
    return found


def _processes() -> dict[str, str]:
    """Which process tells a metric."""
    lines = [line.split("|") for line in METRICS.read_text().splitlines() if line.startswith("| `outrider_")]
    return {line[1].strip(" `"): line[4].strip() for line in lines}


@cache
def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def adapter_rules() -> list[dict[str, Any]]:
    """By which Kubernetes knows metrics that pools scale by."""
    found: dict[str, Any] = yaml.safe_load((MONITORING / "adapter.yaml").read_text())["rules"]
    return [*found["custom"], *found["external"]]


def panels(path: Path) -> list[tuple[str, str]]:
    """Title and query of every line of every panel, with Grafana's variables filled in."""
    dashboard = json.loads(path.read_text())
    shown = [(panel["title"], target) for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [(title, _filled(target["expr"])) for title, target in shown]


def choices(path: Path) -> list[tuple[str, str]]:
    """Of each variable with values from Prometheus: the series that it looks through, and its label."""
    listed = [one["query"] for one in json.loads(path.read_text())["templating"]["list"] if one["type"] == "query"]
    found = [one for query in listed for one in re.findall(r"^label_values\((.+), (\w+)\)$", _filled(query))]
    assert len(found) == len(listed) >= 1, listed
    return found


def _filled(expression: str) -> str:
    return re.sub(r"\$(model|tenant|namespace)", ".*", expression.replace("$__rate_interval", "1m"))


def queries() -> Iterator[tuple[str, str]]:
    """Everything that asks Prometheus for something, by where it stands."""
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    for path in DASHBOARDS:
        yield from ((f"{path.stem}: {title}", expression) for title, expression in panels(path))
        yield from ((f"{path.stem}: choice of {label}", series) for series, label in choices(path))
    for rule in adapter_rules():
        yield f"adapter: {rule['seriesQuery']}", rule["seriesQuery"]
    for name in PROFILES:
        for found in of_kind(rendered(profile(name)), "HorizontalPodAutoscaler", "ScaledObject"):
            yield f"{name}: {found['metadata']['name']}", json.dumps(found["spec"]).replace('\\"', '"')


def unknown(query: str) -> set[str]:
    """Metrics and labels of a query that no process tells."""
    metrics, recorded = known(), {rule["record"] for rule in rules() if "record" in rule}
    names = {re.sub("_(bucket|count)$", "", name) for name in re.findall(r"\boutrider_[a-z0-9_]+", query)}
    names_recorded = set(re.findall(r"\boutrider:[a-z0-9_:]+", query))
    labels = {label for name in names & metrics.keys() for label in metrics[name]} | _ADDED
    asked = set(re.findall(r"[{,]\s*(\w+)(?:=~|!~|!=|=)", query))
    asked |= {label.strip() for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", query) for label in group.split(",")}
    known_labels = labels | ({"model_name"} if names_recorded else set())
    return (names - metrics.keys()) | (names_recorded - recorded) | (asked - known_labels - {""})


def test_every_query_asks_for_metrics_and_labels_that_there_are() -> None:
    asked = list(queries())
    assert len(asked) > 60
    assert {where: wrong for where, query in asked if (wrong := unknown(query))} == {}


def test_the_adapter_serves_every_metric_that_a_profile_scales_by() -> None:
    served = " ".join(rule["seriesQuery"] for rule in adapter_rules())
    for name in PROFILES:
        for found in of_kind(rendered(profile(name)), "HorizontalPodAutoscaler"):
            for metric in found["spec"]["metrics"]:
                if metric["type"] != "Resource":
                    assert metric[metric["type"].lower()]["metric"]["name"] in served


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ("sum(outrider_num_requests_jogging)", "outrider_num_requests_jogging"),
        ('outrider_num_requests_running{model="m"}', "model"),
        ("sum by (tenant) (outrider_num_requests_running)", "tenant"),
        ("outrider:acceptance:ratio_rate1y", "outrider:acceptance:ratio_rate1y"),
    ],
)
def test_a_query_for_what_there_is_not_would_be_found(query: str, wrong: str) -> None:
    assert unknown(query) == {wrong}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_asks_for_the_namespaces_that_are_chosen(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert {"datasource", "namespace"} <= variables
    written = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    for expression in written:
        metrics = re.findall(r"\b(?:outrider|process)_[a-z0-9_]+", expression)
        assert expression.count('namespace=~"$namespace"') == len(metrics) >= 1, expression
    assert set(re.findall(r"\$([a-z]+)", str(dashboard["panels"]))) <= variables


@needs_promtool
def test_promtool_finds_nothing_wrong_with_rules_and_dashboards(tmp_path: Path) -> None:
    expressions = [expression for path in DASHBOARDS for _, expression in panels(path)]
    named = [{"record": f"panel:{number}", "expr": expression} for number, expression in enumerate(expressions)]
    boards = tmp_path / "dashboards.yaml"
    boards.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": named}]}))
    assert _promtool("check", "rules", str(MONITORING / "rules.yaml"), str(boards)) == ""


@needs_promtool
def test_alerts_fire_on_faults_and_are_silent_over_a_healthy_fleet() -> None:
    assert _promtool("test", "rules", str(MONITORING / "rules_test.yaml")) == ""


def test_every_alert_is_made_to_fire_and_says_what_it_means() -> None:
    tested = (MONITORING / "rules_test.yaml").read_text()
    for rule in rules():
        if "alert" in rule:
            assert f'alertname="{rule["alert"]}"' in tested
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert rule["annotations"]["summary"] and rule["annotations"]["description"]


def test_operations_lists_every_alert_with_its_severity_and_its_time() -> None:
    listed = re.findall(r"^\| `(Outrider\w+)` \| (\w+) \| (\w+) \|", OPERATIONS.read_text(), re.MULTILINE)
    alerts = [rule for rule in rules() if "alert" in rule]
    assert listed == [(rule["alert"], rule["labels"]["severity"], rule.get("for", "0m")) for rule in alerts]


def test_the_chart_ships_the_rules_and_every_dashboard_as_they_are() -> None:
    objects = rendered(profile("ha"))
    (shipped,) = of_kind(objects, "PrometheusRule")
    written = (MONITORING / "rules.yaml").read_text()
    assert written.count("absent(") == written.count(_ANYWHERE) == 3
    # So that one release does not stand for another.
    here = written.replace(_ANYWHERE, f'{_ANYWHERE}namespace="llm",')
    assert shipped["spec"] == yaml.safe_load(here)
    boards = {name: text for found in of_kind(objects, "ConfigMap") for name, text in found["data"].items()}
    assert {name: json.loads(text) for name, text in boards.items()} == {
        path.name: json.loads(path.read_text()) for path in DASHBOARDS
    }


_ANYWHERE = "absent(outrider_build_info{"


def test_nobody_misses_drafts_where_the_values_have_none() -> None:
    pool, rules_on = {"main": {"model": "m"}}, {"monitoring": {"rules": {"enabled": True}}}
    for pools, missed in (({"targets": pool}, False), ({"targets": pool, "drafts": pool}, True)):
        (shipped,) = of_kind(rendered({**pools, **rules_on}), "PrometheusRule")
        assert ("OutriderNoDraft" in str(shipped)) is missed


@pytest.mark.parametrize("mode", RAY_MODES)
def test_on_a_ray_cluster_nobody_is_missed_whom_prometheus_does_not_ask(mode: str) -> None:
    rules_on = {"controller": {"mode": mode}, "monitoring": {"rules": {"enabled": True}}}
    (shipped,) = of_kind(rendered(rules_on), "PrometheusRule")
    alerts = {rule.get("alert") for group in shipped["spec"]["groups"] for rule in group["rules"]}
    dropped = {rule.get("alert") for rule in rules()} - alerts
    assert dropped >= {"OutriderNoRouter", "OutriderNoControl", "OutriderTargetsFull", "OutriderTenantAlert"}
    # All that ask for what only routers and control planes tell, and no others.
    told = {name: process for name, process in _processes().items() if process in ("router", "control")}
    asking = [rule for rule in rules() if re.search("|".join([*told, 'component="(router|control)"']), rule["expr"])]
    assert len(told) == 18 and dropped == {rule.get("alert") for rule in asking}


def test_a_request_that_its_client_spoils_is_no_failure_of_ours() -> None:
    """What stands for a fault of ours is counted, a reason that nobody has thought of too."""
    (recorded,) = [rule["expr"] for rule in rules() if rule.get("record") == "outrider:request_errors:rate5m"]
    excluded = set(re.findall(r'reason!~"([^"]+)"', recorded)[0].split("|"))
    of_clients = {Code.CANCELLED, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.PERMISSION_DENIED}
    of_clients |= {Code.RESOURCE_EXHAUSTED, Code.UNIMPLEMENTED, Code.UNAUTHENTICATED, Code.ABORTED}
    for error in _subclasses(OutriderError):
        assert (error.default_reason.lower() in excluded) is (error.code in of_clients), error
    assert not excluded & {"no_router", "no_target", "targets_failed", "draining", "no_metadata"}


def _subclasses(of: type[OutriderError]) -> set[type[OutriderError]]:
    return {
        found for one in of.__subclasses__() if one.__module__ == of.__module__ for found in (one, *_subclasses(one))
    }


def _promtool(*arguments: str) -> str:
    """What it finds wrong."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode else ""
