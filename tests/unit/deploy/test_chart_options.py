"""Values of the chart that no profile sets, and what each changes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from outrider.draft.config import parse_arguments as parse_draft
from outrider.rpc.access.roles import ROUTES
from outrider.target.config import parse_arguments as parse_target
from outrider.vllm.server.plugin_config import PluginConfig

from tests.unit.deploy.chart import (
    CASES,
    CHART,
    KEDA,
    MODES,
    RAY_MODES,
    Object,
    needed,
    notes,
    of_kind,
    on_demo,
    pod_specs,
    pods_of,
    problems,
    profile,
    refused,
    rendered,
    rendered_as_given,
    versions,
)
from tests.unit.deploy.policies import ROLE, Peer, let_in, pods

_SERVING = [name for name in CASES if name != "drafts-alone"]


def workload(objects: list[Object], name: str) -> Object:
    (found,) = [one for one in of_kind(objects, "Deployment", "StatefulSet") if one["metadata"]["name"] == name]
    return found


def container(objects: list[Object], name: str) -> Object:
    """The first of a workload's pods."""
    found: Object = pods_of(workload(objects, name))[0]["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("name", _SERVING)
def test_nothing_ends_a_gateway_that_waits_for_models_to_load(name: str) -> None:
    objects = rendered(profile(name))
    gateway = container(objects, "demo-gateway")
    # Without a target /readyz is 503: that of the startup probe would restart it meanwhile.
    assert gateway["startupProbe"]["httpGet"]["path"] == gateway["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/readyz"


@pytest.mark.parametrize("name", _SERVING)
def test_a_rollout_waits_for_the_longest_start(name: str) -> None:
    objects = rendered(profile(name))
    deployments = {one["metadata"]["labels"][ROLE]: one for one in of_kind(objects, "Deployment")}
    longest = {}
    for role in ("target", "draft"):
        probe = pods_of(deployments[role])[0]["spec"]["containers"][0]["startupProbe"]
        longest[role] = probe["periodSeconds"] * probe["failureThreshold"]
        assert deployments[role]["spec"]["progressDeadlineSeconds"] > longest[role]
    assert deployments["gateway"]["spec"]["progressDeadlineSeconds"] > longest["target"]


def test_a_pool_scales_by_pods_of_its_own_and_not_by_those_of_a_pool_whose_name_begins_alike() -> None:
    (scaled,) = of_kind(rendered({"targets": {"main": {"keda": KEDA}}}), "ScaledObject")
    (pods,) = re.findall('pod=~"([^"]+)"', scaled["spec"]["triggers"][0]["metadata"]["query"])
    # As a ReplicaSet names them. Prometheus' patterns hold for the whole value.
    assert re.fullmatch(pods, "demo-target-main-6d5f8c7b9d-x2k4q")
    assert not re.fullmatch(pods, "demo-target-main-b-6d5f8c7b9d-x2k4q")
    assert not re.fullmatch(pods, "demo-target-main2-6d5f8c7b9d-x2k4q")


def test_a_name_that_kubernetes_cuts_is_refused_where_pods_are_found_by_it() -> None:
    from helm_python import Chart

    values = needed(on_demo({"targets": {"main": {"keda": KEDA}}}))
    Chart.load(CHART).render(values, name="a" * 34, namespace="llm")
    with pytest.raises(Exception, match=r"targets\.main\.keda: metric finds no pods"):
        Chart.load(CHART).render(values, name="a" * 35, namespace="llm")


def test_a_profile_scales_by_the_model_that_the_pool_has() -> None:
    values = profile("h100-tp8")
    values["targets"]["main"]["model"] = "other"
    (scaled,) = of_kind(rendered(values), "ScaledObject")
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    assert re.findall('model_name="([^"]*)"', query) == ["other", "other"]
    assert re.findall('namespace="([^"]*)"', query) == ["llm", "llm"]


def _scaling(pool: str, **by: str) -> dict[str, Any]:
    kind = "autoscaling" if "value" in by else "keda"
    return {pool: {"main": {kind: {"enabled": True, "minReplicas": 1, "maxReplicas": 2, **by}}}}


@pytest.mark.parametrize(
    "values",
    [
        _scaling("drafts", metric="outrider_draft_pool_utilization", value="700m"),
        _scaling("drafts", query="max(outrider_draft_workers_wanted)", threshold="1"),
        _scaling("targets", query="sum(outrider_admission_queue_length) or vector(0)", threshold="1"),
    ],
)
def test_a_pool_does_not_scale_by_what_prometheus_cannot_have(values: dict[str, Any]) -> None:
    """On a Ray cluster it reaches no router and no control plane."""
    assert of_kind(rendered(values), "HorizontalPodAutoscaler", "ScaledObject")
    for mode in RAY_MODES:
        with pytest.raises(Exception, match=rf"main\.(autoscaling|keda): outrider_.*controller\.mode {mode}"):
            rendered({**values, "controller": {"mode": mode}})


@pytest.mark.parametrize("mode", RAY_MODES)
def test_on_a_ray_cluster_pools_scale_by_what_workers_tell(mode: str) -> None:
    values = _scaling("drafts", query="sum(outrider_draft_num_requests_running)", threshold="5")
    values |= _scaling("targets", metric="outrider_num_requests_running", threshold="5")
    assert len(of_kind(rendered({**values, "controller": {"mode": mode}}), "ScaledObject")) == 2


def test_a_model_of_the_hub_is_fetched_with_the_token_in_a_secret() -> None:
    hub = {"model": "tiny", "path": "hf://owner/tiny@main"}
    values = {"targets": {"main": hub}, "drafts": {"main": hub}, "models": {"hubTokenSecret": "hub"}}
    assert not refused(values)
    objects = rendered(values)
    for role, parse in (("target", parse_target), ("draft", parse_draft)):
        worker = container(objects, f"demo-{role}-main")
        arguments = [word.replace("$(POD_IP)", "10.1.2.3") for word in worker["args"]]
        assert (config := parse([*arguments, "--metadata", "redis://r:6379"])).model == hub["path"]
        assert config.model_name == "tiny"
        variables = {variable["name"]: variable for variable in worker["env"]}
        assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
        # The root is read-only: what is fetched lies in the cache's volume.
        (cache,) = [mount["mountPath"] for mount in worker["volumeMounts"] if mount["name"] == "cache"]
        assert variables["OUTRIDER_CACHE"]["value"] == cache and variables["HF_HOME"]["value"].startswith(f"{cache}/")
    others = [str(spec) for labels, spec in pod_specs(objects) if labels[ROLE] not in ("target", "draft")]
    assert len(others) == 4 and "HF_TOKEN" not in "".join(others)


@pytest.mark.parametrize("path", ["hf://tiny", "hf://owner/tiny@", "hf://owner/tiny/x", "http://o/tiny", "/tmp/x"])
def test_a_path_that_no_worker_takes_is_refused(path: str) -> None:
    assert "path" in refused({"targets": {"main": {"model": "tiny", "path": path}}})


def test_who_a_pod_runs_as_may_be_another_or_left_to_the_cluster() -> None:
    own = {"runAsUser": 2000, "supplementalGroups": [3000], "seLinuxOptions": {"level": "s0:c1,c2"}}
    left = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    for values, changed in (({}, {}), (own, own), (left, left)):
        assert not refused({"podSecurityContext": values})
        objects = rendered({"podSecurityContext": values})
        assert [problem for found in objects for problem in problems(found, versions()[-1])] == []
        wanted = {"runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001, **changed}
        wanted |= {"fsGroupChangePolicy": "OnRootMismatch", "runAsNonRoot": True}
        wanted["seccompProfile"] = {"type": "RuntimeDefault"}
        for _, spec in pod_specs(objects):
            assert spec["securityContext"] == {name: value for name, value in wanted.items() if value is not None}


@pytest.mark.parametrize("values", [{"runAsUser": 0}, {"runAsNonRoot": False}, {"seccompProfile": {}}])
def test_no_pod_can_be_made_root_or_lose_its_profile(values: dict[str, Any]) -> None:
    assert refused({"podSecurityContext": values})


def test_every_pod_can_be_placed() -> None:
    """On a cluster whose nodes all have taints, too."""
    place = {
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
    }
    parts = dict.fromkeys(("gateway", "controller", "redis", "tests"), place)
    values = {**parts, "targets": {"main": place}, "drafts": {"main": place}}
    assert not refused(on_demo(values))
    roles = set()
    for labels, spec in pod_specs(rendered(values)):
        assert {name: spec.get(name) for name in place} == place, labels
        roles.add(labels[ROLE])
    assert roles == {"gateway", "controller", "redis", "test", "target", "draft"}


@pytest.mark.parametrize("mode", ["ray", *MODES])
def test_every_role_takes_what_a_cluster_asks_of_its_pods(mode: str) -> None:
    own = {
        "serviceAccountName": "own",
        "initContainers": [{"name": "wait", "image": "own"}],
        "podLabels": {"team": "a", ROLE: "stolen"},
        "podAnnotations": {"of": "pod"},
        "topologySpreadConstraints": [{"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}],
        "env": [{"name": "OTEL_SERVICE_NAME", "value": "own"}],
        "extraVolumes": [{"name": "own", "configMap": {"name": "own"}}],
        "extraVolumeMounts": [{"name": "own", "mountPath": "/own", "readOnly": True}],
    }
    pools = {"targets": {"main": own}, "drafts": {"main": own}}
    shared = {"podLabels": {"team": "b", "cost": "c"}, "podAnnotations": {"of": "all"}}
    values = {**pools, **shared, "gateway": own, "controller": {"mode": mode, **own}}
    assert not refused(on_demo(values))
    objects = rendered(values)
    assert [problem for found in objects for problem in problems(found, versions()[-1])] == []
    found = set()
    for pod in (pod for one in objects for pod in pods_of(one)):
        labels, spec = pod["metadata"]["labels"], pod["spec"]
        # What selectors ask for stays the chart's.
        role = labels[ROLE]
        theirs = role == "redis"
        found.add(role)
        assert (labels["team"], labels["cost"]) == ("b" if theirs else "a", "c")
        assert pod["metadata"]["annotations"] == {"of": "all" if theirs else "pod"}
        if not theirs:
            assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("own", False)
            assert spec["initContainers"] == own["initContainers"]
            (spread,) = spec["topologySpreadConstraints"]
            assert spread["topologyKey"] == "rack"
            assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
            assert own["extraVolumes"][0] in spec["volumes"]
            for one in spec["containers"]:
                assert own["extraVolumeMounts"][0] in one["volumeMounts"] and own["env"][0] in one["env"]
    assert found == {"target", "draft", "gateway", "controller", "redis"}


def test_pods_spread_as_far_as_possible_unless_told_not_to() -> None:
    (spread,) = [spec for labels, spec in pod_specs(rendered({})) if labels[ROLE] == "gateway"]
    keys = [one["topologyKey"] for one in spread["topologySpreadConstraints"]]
    assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    told = rendered({"gateway": {"topologySpreadConstraints": []}})
    (together,) = [spec for labels, spec in pod_specs(told) if labels[ROLE] == "gateway"]
    assert "topologySpreadConstraints" not in together


def test_a_pool_has_a_number_for_when_prometheus_does_not_answer() -> None:
    fallback = {"failureThreshold": 4, "replicas": 3}
    by = {"metric": "outrider_num_requests_running", "threshold": "5"}
    scaling = {"enabled": True, "minReplicas": 1, "maxReplicas": 4, **by}
    for given in ({}, {"fallback": fallback}):
        values = {"targets": {"main": {"keda": {**scaling, **given}}}}
        assert not refused(on_demo(values))
        (scaled,) = of_kind(rendered(values), "ScaledObject")
        assert {"fallback": scaled["spec"].get("fallback")} == {"fallback": None, **given}


def test_an_ingress_leads_http_and_grpc_to_their_ports() -> None:
    annotations = {"nginx.ingress.kubernetes.io/backend-protocol": "GRPC"}
    ingress = {"enabled": True, "className": "nginx", "host": "api.example.org", "tlsSecret": "cert"}
    objects = rendered({"gateway": {"ingress": ingress}})
    (http,) = [_led(one) for one in of_kind(objects, "Ingress")]
    assert (http[0], http[2]) == ("api.example.org", "http")
    # All that clients ask for. /metrics is for operators.
    assert {path for path in ROUTES if not path.startswith(http[1])} == {"/metrics"}
    both = ingress | {"grpcHost": "grpc.example.org", "grpcAnnotations": annotations}
    objects = rendered({"gateway": {"ingress": both}})
    found = {one["metadata"]["name"]: one for one in of_kind(objects, "Ingress")}
    assert _led(found["demo-gateway"]) == http
    grpc = found["demo-gateway-grpc"]
    assert _led(grpc) == ("grpc.example.org", ("/",), "grpc") and grpc["metadata"]["annotations"] == annotations
    assert "annotations" not in found["demo-gateway"]["metadata"]
    assert grpc["spec"]["tls"] == [{"hosts": ["grpc.example.org"], "secretName": "cert"}]
    assert [problem for one in objects for problem in problems(one, versions()[-1])] == []


def _led(ingress: Object) -> tuple[str, tuple[str, ...], str]:
    """Host, paths, and the port of the gateway's service."""
    (rule,) = ingress["spec"]["rules"]
    ports = {path["backend"]["service"]["port"]["name"] for path in rule["http"]["paths"]}
    assert {path["backend"]["service"]["name"] for path in rule["http"]["paths"]} == {"demo-gateway"}
    (port,) = ports
    return rule["host"], tuple(path["path"] for path in rule["http"]["paths"]), port


@pytest.mark.parametrize("mode", ["ray", *MODES])
def test_pools_are_those_that_the_values_have_and_no_others(mode: str) -> None:
    pools: list[dict[str, dict[str, Any]]] = [
        {"targets": {"big": {"model": "b"}}, "drafts": {"small": {"model": "s"}, "head": {"model": "h"}}},
        {"targets": {"big": {"model": "b"}}},
        {"drafts": {"small": {"model": "s"}}},
        {"targets": {}, "drafts": {"small": {"model": "s"}}},
    ]
    for given in pools:
        values = needed({**given, "controller": {"mode": mode}})
        assert not refused(values)
        found = [labels for labels, _ in pod_specs(rendered_as_given(values)) if "outrider/pool" in labels]
        wanted = {(role, name) for role in ("target", "draft") for name in given.get(f"{role}s", {})}
        assert {(labels[ROLE], labels["outrider/pool"]) for labels in found} == wanted


def test_without_a_pool_the_demo_runs_as_its_profile_says() -> None:
    demo, profiled = rendered_as_given(needed({})), rendered_as_given(needed(profile("dev-cpu")))
    assert [sorted(_models(objects)) for objects in (demo, profiled)] == [
        ["smollm2-135m-draft", "smollm2-135m-instruct"]
    ] * 2


def _models(objects: list[Object]) -> list[str]:
    every = [one["args"] for _, spec in pod_specs(objects) for one in spec["containers"] if "--model-name" in str(one)]
    return [args[args.index("--model-name") + 1] for args in every]


def test_drafts_and_routers_serve_vllm_servers_alone() -> None:
    """Without a gateway, which would have nothing to ask, and without alerts that miss one."""
    values = needed(profile("drafts-alone"))
    assert not refused(values)
    objects = rendered_as_given(values)
    assert {labels[ROLE] for labels, _ in pod_specs(objects)} == {"controller", "draft", "redis"}
    assert not of_kind(objects, "Ingress")
    assert 'component="gateway"' not in str(of_kind(objects, "PrometheusRule"))
    server = Peer({}, "serving")
    inside = {role: let_in(objects, server, pod) for role, pod in pods(objects).items()}
    assert inside == {"controller": [("TCP", 9100, 9101)], "draft": [("TCP", 9001, 9001)], "redis": []}
    said = notes(values)
    (told,) = re.findall(r"--additional-config '(.+)'", said)
    (address,) = PluginConfig.of(json.loads(told)).routers
    # A headless service has the addresses of its pods, on all their ports.
    name, _, port = address.partition(":")
    (service,) = [one for one in of_kind(objects, "Service") if f"{one['metadata']['name']}.llm.svc" == name]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"][ROLE] == "controller"
    assert port == "9100" and "curl" not in said
