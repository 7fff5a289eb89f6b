"""The values that the Helm chart refuses, and the notes that it prints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml
from outrider.rpc.access.roles import ClusterSecret, Role

from tests.unit.deploy.chart import (
    CHART,
    KEDA,
    SCALING,
    containers,
    needed,
    notes,
    problems,
    profile,
    pushed,
    refused,
    rendered,
    rendered_as_given,
    versions,
)

_TLS = dict.fromkeys(("gateway", "controller", "target", "draft"), "tls")
_SALTED = {"image": {"registry": "r"}, "controller": {"mode": "kuberay", "cacheSaltSecret": "s"}}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"gatway": {}}, "gatway"),
        ({"gateway": {"replicas": 0}}, "replicas"),
        ({"targets": {"main": {"replica": 2}}}, "replica"),
        ({"targets": {"Main": {"model": "m"}}}, "Main"),
        ({"targets": {"main": {"path": "relative"}}}, "path"),
        ({"drafts": {"main": {"tensorParallel": 2}}}, "tensorParallel"),
        ({"drafts": {"main": {"replicas": 2}}}, "model"),
        ({"image": {"digests": {"target": "latest"}}}, "target"),
        ({"redis": {"url": "http://redis"}}, "url"),
        ({"cache": {"sizeLimit": "1ki"}}, "sizeLimit"),
        ({"cache": {"sizeLimit": "1.2.3Gi"}}, "sizeLimit"),
        ({"gateway": {"resources": {"requests": {"cpu": -1}}}}, "cpu"),
        ({"targets": {"main": {"model": "m", "autoscaling": SCALING | {"averageValue": "five"}}}}, "averageValue"),
        ({"logFormat": "xml"}, "logFormat"),
        ({"controller": {"mode": "systemd"}}, "mode"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    assert named in refused(values)


@pytest.mark.parametrize("pool", ["targets", "drafts"])
@pytest.mark.parametrize(("kind", "scaling"), [("autoscaling", SCALING), ("keda", KEDA)])
@pytest.mark.parametrize("metric", ["outrider_num_request_running", "outrider_generation_tokens_total"])
def test_what_is_no_gauge_of_ours_is_no_metric_to_scale_by(
    pool: str, kind: str, scaling: dict[str, Any], metric: str
) -> None:
    complaint = refused({pool: {"main": {kind: scaling | {"metric": metric}}}})
    assert f"/{pool}/main/{kind}/metric" in complaint and "outrider_num_requests_running" in complaint


def test_the_metrics_to_scale_by_are_all_gauges_that_the_processes_have() -> None:
    page = (CHART.parents[1] / "docs/metrics.md").read_text()
    gauges = re.findall(r"^\| `(outrider_\w+)` \| gauge ", page, re.MULTILINE)
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["definitions"]["gauge"]["enum"] == [name for name in gauges if not name.endswith("_info")]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"redis": {"enabled": False}}, "redis"),
        # The chart's own, which is on unless it is turned off, was used in place of it, or could alone be reached.
        ({"redis": {"url": "redis://own"}}, "redis: url"),
        ({"redis": {"urlSecret": "own"}}, "redis: url"),
        ({"redis": {"enabled": False, "url": "redis://own", "urlSecret": "own"}}, "redis: url"),
        ({"controller": {"mode": "kuberay", "replicas": 2, "cacheSaltSecret": "s"}}, "controller.ray.workers"),
        ({"gateway": {"ingress": {"enabled": True}}}, "ingress.host"),
        ({"targets": {"main": {"engine": "vllm", "gpus": 1, "tensorParallel": 8}}}, "targets.main.gpus"),
        ({"targets": {"main": {"gpus": 8, "tensorParallel": 8}}}, "targets.main.tensorParallel"),
        ({"targets": {"main": {"engine": "vllm", "gpus": 8}}}, "targets.main.gpus"),
        ({"drafts": {"main": {"gpus": 2}}}, "drafts.main.gpus"),
        ({"targets": {"main": {"path": "/models/own"}}}, "targets.main.path"),
        ({"certManager": {"enabled": True, "duration": "24h"}}, "certManager.renewBefore"),
        ({"gateway": {"autoscaling": {"enabled": True, "minReplicas": 9}}}, "gateway.autoscaling"),
        ({"targets": {"main": {"autoscaling": SCALING | {"minReplicas": 3}}}}, "targets.main.autoscaling"),
        ({"targets": {"main": {"autoscaling": SCALING | {"value": "1"}}}}, "targets.main.autoscaling"),
        ({"targets": {"main": {"autoscaling": SCALING | {"selector": {"draft": "d"}}}}}, "targets.main.autoscaling"),
        ({"drafts": {"main": {"keda": KEDA | {"minReplicas": 3}}}}, "drafts.main.keda"),
        ({"drafts": {"main": {"keda": KEDA | {"minReplicas": 0}}}}, "drafts.main.keda"),
        ({"drafts": {"main": {"keda": KEDA | {"query": "sum(x)"}}}}, "drafts.main.keda"),
        ({"certManager": {"enabled": True}, "tlsSecrets": _TLS}, "tlsSecrets"),
        ({"drafts": {"main": {"autoscaling": SCALING, "keda": KEDA}}}, "drafts.main.keda"),
        ({"drafts": {"main": {"keda": {k: v for k, v in KEDA.items() if k != "metric"}}}}, "drafts.main.keda"),
        ({"drafts": {"main": {"autoscaling": SCALING | {"averageValue": ""}}}}, "drafts.main.autoscaling"),
    ],
)
def test_values_that_lack_something_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(Exception, match=re.escape(named)):
        rendered(values)


def test_without_a_tag_images_are_those_of_the_charts_version() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    images = [one["image"] for one in containers(rendered({"image": {"tag": ""}}))]
    assert len(images) >= 5 and {image.rpartition(":")[2] for image in images if "redis:" not in image} == {version}


def test_values_that_people_write_are_taken() -> None:
    off = {"enabled": False}
    numbers = {"autoscaling": SCALING | {"averageValue": 0.7}, "keda": off}
    for values in (
        {"cache": {"sizeLimit": "1048576Ki"}, "gateway": {"resources": {"requests": {"cpu": 0.5, "memory": "1e9"}}}},
        {"targets": {"main": {"model": "m", **numbers}}},
        {"drafts": {"main": {"model": "m", "autoscaling": off, "keda": KEDA | {"threshold": 5}}}},
    ):
        assert not refused(values)
        assert [one for found in rendered(values) for one in problems(found, versions()[-1])] == []


def test_a_name_with_which_kubernetes_makes_no_pods_is_refused() -> None:
    """Of a StatefulSet: names of its revisions, which are 11 characters longer, are labels of its pods."""
    from helm_python import Chart

    for mode, longest in (("plain", 53), ("ray-cluster", 34)):
        values, chart = needed({"controller": {"mode": mode}}), Chart.load(CHART)
        made = "".join(chart.render(values, name="a" * longest, namespace="llm").values())
        names = re.findall(r"kind: StatefulSet\nmetadata:\n  name: (\S+)", made)
        assert len(names) >= 2 and all(len(name) <= 52 for name in names)
    with pytest.raises(Exception, match=r"controller\.mode: .* more than 34 characters"):
        chart.render(values, name="a" * 35, namespace="llm")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "image.registry: "),
        ({"image": {"registry": "r"}}, "controller.cacheSaltSecret: "),
        (_SALTED, "controller.ray.tokenSecret: "),
        (pushed({"controller": {"replicas": 2}}), "controller.cacheSaltSecret: needed where controller.replicas"),
    ],
)
def test_what_nobody_else_can_know_or_would_be_another_each_time_has_to_be_given(
    values: dict[str, Any], named: str
) -> None:
    with pytest.raises(Exception, match=re.escape(named)):
        rendered_as_given(values)


def test_the_notes_have_a_first_request_for_the_model_that_is_served() -> None:
    assert '"model": "llama-3.1-8b-instruct"' in notes(profile("single-node"))
    assert "demo-gateway" in notes({})


def test_the_notes_say_how_to_ask_and_look_where_there_is_tls_or_a_secret() -> None:
    plain = notes({})
    assert "curl http://127" in plain and "/console" in plain and "OUTRIDER_TLS_DIR" not in plain
    made = notes({"certManager": {"enabled": True, "publicNames": ["api.example.org"]}})
    assert "curl -k https://127" in made and "demo-operator-tls" in made
    assert "OUTRIDER_TLS_DIR=operator outrider get workers" in notes({"tlsSecrets": _TLS})
    # In a pod, which has Python and the secret.
    (program,) = re.findall(
        r"""exec statefulset/demo-controller -- sh -c '.*python -c "([^"]+)".*'""", notes({"clusterSecret": "c"})
    )
    made_of = subprocess.run([sys.executable, "-c", program], input=b"x" * 32 + b"\n", capture_output=True, check=True)
    assert made_of.stdout.decode().strip() == ClusterSecret(b"x" * 32).token(Role.OPERATOR)
    assert not [line for line in plain.splitlines() if re.match(" +(python|outrider)", line)]
    assert "POD 9003" in notes({"controller": {"mode": "kuberay"}})
