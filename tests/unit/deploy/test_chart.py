"""The Helm chart: what Helm, Kubernetes and our own processes say of what it renders."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from outrider.rpc.access.roles import Role

from benchmarks.scenarios.gpu_pairs import PAIRS
from benchmarks.support.machines import LLAMA_1B, LLAMA_70B
from tests.unit.deploy.chart import (
    CASES,
    CHART,
    CUSTOM_KINDS,
    MODES,
    RAY_MODES,
    SCALING,
    Object,
    containers,
    of_kind,
    pod_specs,
    pods_of,
    problems,
    profile,
    pushed,
    refused,
    rendered,
    rendered_as_given,
    versions,
)
from tests.unit.deploy.policies import ROLE, Peer, let_in, let_out, pods
from tests.unit.deploy.processes import SECRETS, parsed, processes


@pytest.fixture(params=CASES)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return rendered(profile(request.param))


@pytest.mark.parametrize("name", CASES)
def test_helms_strict_lint_finds_nothing(name: str) -> None:
    from helm_python import lint

    report = lint(CHART, profile(name), strict=True, kube_version="v1.27.0")
    assert not report["errors"]
    assert not [message for message in report["messages"] if message["severity"] > 1]


@pytest.mark.parametrize("place", [0, -1])
def test_the_oldest_and_the_newest_kubernetes_admit_every_object(objects: list[Object], place: int) -> None:
    assert [problem for found in objects for problem in problems(found, versions()[place])] == []


@pytest.mark.slow
def test_every_kubernetes_between_admits_every_object(objects: list[Object]) -> None:
    assert len(versions()) > 5
    for version in versions()[1:-1]:
        assert [problem for found in objects for problem in problems(found, version)] == []


def test_without_ray_control_plane_and_routers_are_containers_and_others_reach_the_same(tmp_path: Path) -> None:
    shared = {"clusterSecret": "outrider-cluster"}
    values = {"controller": {"mode": "plain", "routers": 2, "args": ["--max-draft-tokens", "3"]}, **shared}
    objects, with_ray = rendered(values), rendered({"controller": {"routers": 2}, **shared})
    started = {process.container: parsed(process) for process in processes(objects, tmp_path)}
    own = {name: config for name, config in started.items() if name == "control" or name.startswith("router-")}
    assert own.keys() == {"control", "router-0", "router-1"}
    assert all(config.secret is not None for config in own.values())
    control, router = own["control"], own["router-1"]
    assert (control.listen, control.advertise, control.ops_listen) == ("0.0.0.0:9003", "10.1.2.3:9003", "0.0.0.0:9009")
    assert (router.listen, router.advertise, router.ops_listen) == ("0.0.0.0:9101", "10.1.2.3:9101", "0.0.0.0:9201")
    assert len(router.cache_salt_key) == 32 and router.policy.max_draft_tokens == 3
    (controller,) = [one for one in containers(with_ray) if one["name"] == "controller"]
    ports = {
        port["name"]: port["containerPort"]
        for one in containers(objects)
        if one["name"] in own
        for port in one["ports"]
    }
    assert ports == {port["name"]: port["containerPort"] for port in controller["ports"]}
    assert of_kind(objects, "NetworkPolicy", "Service") == of_kind(with_ray, "NetworkPolicy", "Service")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ray_accepts_the_flags_that_the_chart_gives_it() -> None:
    from ray.scripts.scripts import start

    nodes = {mode: dict(_ray_flags(rendered({"controller": {"mode": mode}}))) for mode in RAY_MODES}
    for node, flags in nodes["ray-cluster"].items():
        start.make_context("ray start", list(flags))
        # KubeRay makes flags of its parameters, and adds the address of its own service.
        ours = {flag for flag in flags if flag.startswith("--") and not flag.startswith(("--address", "--disable"))}
        assert ours - {"--head", "--block"} == set(nodes["kuberay"][node])
    assert start.make_context("ray start", nodes["ray-cluster"]["head"]).params["num_cpus"] == 0
    (address,) = [flag for flag in nodes["ray-cluster"]["worker"] if flag.startswith("--address=")]
    objects = rendered({"controller": {"mode": "ray-cluster"}})
    (service,) = [one for one in of_kind(objects, "Service") if address.startswith(f"--address={_name(one)}:")]
    assert service["spec"]["publishNotReadyAddresses"]


def _name(found: Object) -> str:
    name: str = found["metadata"]["name"]
    return name


def _ray_flags(objects: list[Object]) -> Iterator[tuple[str, list[str]]]:
    """Of each kind of node, head and worker: its flags of `ray start`."""
    for labels, spec in pod_specs(objects):
        if (node := labels.get("outrider/ray-node")) and spec["containers"][0].get("command") == ["ray", "start"]:
            yield node, spec["containers"][0]["args"]
    for cluster in of_kind(objects, "RayCluster"):
        groups = {"head": cluster["spec"]["headGroupSpec"], "worker": cluster["spec"]["workerGroupSpecs"][0]}
        for node, group in groups.items():
            yield node, [f"--{flag}={value}" for flag, value in group["rayStartParams"].items()]


def test_of_a_raycluster_its_operator_writes_the_command() -> None:
    (cluster,) = of_kind(rendered({"controller": {"mode": "kuberay", "ray": {"workers": 3}}}), "RayCluster")
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert {group["replicas"], group["minReplicas"], group["maxReplicas"]} == {3}
    for template in (cluster["spec"]["headGroupSpec"]["template"], group["template"]):
        # It takes the first container for Ray's.
        first = template["spec"]["containers"][0]
        assert "command" not in first and "args" not in first
        assert "metrics" in {port["name"] for port in first["ports"]}


def _fields(found: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The way to every field below, but for names that are the operator's: of labels and the like."""
    for key, value in found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ():
        if isinstance(key, str):
            yield (*path, key)
        if key not in ("labels", "annotations", "matchLabels", "rayStartParams", "template"):
            yield from _fields(value, (*path, key))


@pytest.mark.parametrize("kind", CUSTOM_KINDS)
def test_a_misspelt_field_of_an_operators_own_kind_is_found(kind: str) -> None:
    every = [
        found for name in ("cert-manager", "everything", "everything-kuberay") for found in rendered(profile(name))
    ]
    samples = of_kind(every, kind)
    assert samples
    for sample in samples:
        assert problems(sample, versions()[-1]) == []
        for path in _fields(sample["spec"], ("spec",)):
            wrong = copy.deepcopy(sample)
            within = reduce(lambda inner, key: inner[key], path[:-1], wrong)
            within[f"{path[-1]}s"] = within.pop(path[-1])
            assert problems(wrong, versions()[-1]), path


def test_the_controller_of_a_ray_cluster_shares_what_it_joins_the_head_by() -> None:
    for mode in RAY_MODES:
        heads = [spec for labels, spec in pod_specs(rendered({"controller": {"mode": mode}})) if _is_head(labels)]
        (head,) = heads
        ray, controller = head["containers"]
        assert head["shareProcessNamespace"] and ray["volumeMounts"] == controller["volumeMounts"]
        assert {"/tmp", "/dev/shm"} <= {mount["mountPath"] for mount in ray["volumeMounts"]}
        auth = {variable["name"]: variable for variable in ray["env"] if variable["name"].startswith("RAY_")}
        assert auth["RAY_AUTH_MODE"]["value"] == "token" and "secretKeyRef" in auth["RAY_AUTH_TOKEN"]["valueFrom"]
        assert all(variable in controller["env"] for variable in auth.values())


def _is_head(labels: Object) -> bool:
    return labels.get("outrider/ray-node") == "head"


def test_with_a_cluster_secret_every_process_asks_for_a_role(tmp_path: Path) -> None:
    for mode in ("ray", *MODES):
        objects = rendered({"clusterSecret": "outrider-cluster", "controller": {"mode": mode}})
        for process in processes(objects, tmp_path):
            words = process.arguments
            given = Path(words[words.index("--cluster-secret-file") + 1])
            assert given.read_bytes() == SECRETS["outrider-cluster"]["secret"] and parsed(process)


@pytest.mark.parametrize("name", ["tls-secrets", "cert-manager"])
def test_with_certificates_no_process_serves_in_plain_text(name: str, tmp_path: Path) -> None:
    for process in processes(rendered(profile(name)), tmp_path):
        assert "--insecure" not in process.arguments
        words = process.arguments
        # Its parser refuses the certificate of another role.
        assert Path(words[words.index("--tls-dir") + 1], "tls.crt").exists() and parsed(process)
        assert ("--public-tls-dir" in words) is (process.container == "gateway")


def test_certificates_for_some_roles_alone_are_refused() -> None:
    from helm_python import HelmRenderError

    with pytest.raises(HelmRenderError, match="needed together"):
        rendered({"tlsSecrets": {"gateway": "tls-gateway"}})


def test_cert_manager_makes_what_each_role_proves_itself_by() -> None:
    values = {"certManager": {"enabled": True, "publicNames": ["api.example.org"]}}
    objects = rendered(values)
    made = {one["spec"]["secretName"]: one["spec"] for one in of_kind(objects, "Certificate")}
    assert [secret for secret, spec in made.items() if spec.get("isCA")] == ["demo-authority"]
    (authority,) = [one for one in of_kind(objects, "Issuer") if "ca" in one["spec"]]
    assert authority["spec"]["ca"]["secretName"] == "demo-authority"
    roles = {name: [role.dns_name] for name, role in _OF_ONE_ROLE.items()}
    roles["controller"] = [Role.ROUTER.dns_name, Role.CONTROL.dns_name]
    for name, names in {**roles, "public": ["api.example.org"]}.items():
        spec = made.pop(f"demo-{name}-tls")
        assert spec["dnsNames"] == names and spec["issuerRef"]["name"] == _name(authority)
        assert set(spec["usages"]) >= ({"server auth"} if name == "public" else {"server auth", "client auth"})
    assert made.keys() == {"demo-authority"}
    # Each process serves by its own.
    for labels, spec in pod_specs(objects):
        secrets = {volume["secret"]["secretName"] for volume in spec.get("volumes", ()) if "secret" in volume}
        certificates = {name for name in secrets if name.endswith("-tls")}
        role = labels[ROLE]
        ours = {"gateway": {"demo-gateway-tls", "demo-public-tls"}, "redis": set(), "test": set()}
        assert certificates == ours.get(role, {f"demo-{role}-tls"})
        assert "--insecure" not in str(spec["containers"])
    services = {_name(one): one["spec"]["ports"][0].get("appProtocol") for one in of_kind(objects, "Service")}
    assert services["demo-gateway"] == services["demo-controller"] == "https"


_OF_ONE_ROLE = {role.value: role for role in (Role.GATEWAY, Role.TARGET, Role.DRAFT, Role.OPERATOR)}


def test_certificates_come_from_an_issuer_of_the_operators_own() -> None:
    issuer = {"name": "corp", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    objects = rendered({"certManager": {"enabled": True, "issuer": issuer}})
    assert not of_kind(objects, "Issuer")
    assert [one["spec"]["issuerRef"] for one in of_kind(objects, "Certificate")] == [issuer] * 5


def test_workers_alone_share_a_volume_for_what_they_fetch() -> None:
    (claim,) = of_kind(rendered({"cache": {"claim": {"enabled": True, "size": "5Gi"}}}), "PersistentVolumeClaim")
    assert (_name(claim), claim["spec"]["accessModes"]) == ("demo-cache", ["ReadWriteMany"])
    for values, name in (({"claim": {"enabled": True}}, "demo-cache"), ({"existingClaim": "mine"}, "mine")):
        sharing = {}
        for labels, spec in pod_specs(rendered({"cache": values})):
            for volume in spec.get("volumes", ()):
                if volume["name"] == "cache":
                    sharing[labels[ROLE]] = volume.get("persistentVolumeClaim", {}).get("claimName")
        assert sharing == {"target": name, "draft": name, "gateway": None, "controller": None}


def test_pods_are_as_podsecurity_restricted_wants_them(objects: list[Object]) -> None:
    for _, spec in pod_specs(objects):
        security = spec["securityContext"]
        assert (security["runAsNonRoot"], security["seccompProfile"]["type"]) == (True, "RuntimeDefault")
        assert spec["automountServiceAccountToken"] is False
        assert not any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))
        assert {next(iter(volume.keys() - {"name"})) for volume in spec.get("volumes", ())} <= {
            "configMap",
            "emptyDir",
            "persistentVolumeClaim",
            "secret",
        }
    for container in containers(objects):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False and security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"] and container["resources"]["requests"]["cpu"]


def test_a_pod_has_longer_to_end_than_its_process_to_drain(objects: list[Object]) -> None:
    for _, spec in pod_specs(objects):
        for container in spec["containers"]:
            words = container.get("args", [])
            if (flag := "--drain-timeout") in words:
                delay = int(words[words.index("--drain-delay") + 1]) if "--drain-delay" in words else 0
                assert spec["terminationGracePeriodSeconds"] > int(words[words.index(flag) + 1]) + delay


def test_probes_and_services_name_ports_that_are_there(objects: list[Object]) -> None:
    for container in containers(objects):
        ports = {port["name"] for port in container.get("ports", ())}
        assert all(len(name) <= 15 for name in ports)
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = container.get(kind, {})
            port = probe.get("httpGet", probe.get("tcpSocket", {})).get("port")
            assert port is None or port in ports
        # What joins a Ray cluster ends when it cannot work.
        joins = "--ray-address" in container.get("args", ())
        assert container["name"] == "test" or joins or "startupProbe" in container
    pods = list(pod_specs(objects))
    for service in of_kind(objects, "Service"):
        chosen = [spec for labels, spec in pods if service["spec"]["selector"].items() <= labels.items()]
        assert chosen, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            names = {named["name"] for spec in chosen for one in spec["containers"] for named in one.get("ports", ())}
            assert port["targetPort"] in names


def test_every_selector_finds_pods_and_every_reference_an_object(objects: list[Object]) -> None:
    pods = [labels for labels, _ in pod_specs(objects)]
    for found in of_kind(objects, "PodDisruptionBudget", "Deployment", "StatefulSet", "PodMonitor"):
        chosen = found["spec"]["selector"]["matchLabels"].items()
        assert any(chosen <= labels.items() for labels in pods), found["metadata"]["name"]
    workloads = {found["metadata"]["name"] for found in of_kind(objects, "Deployment", "StatefulSet")}
    for found in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        assert found["spec"]["scaleTargetRef"]["name"] in workloads
    names = [(found["kind"], found["metadata"]["name"]) for found in objects]
    assert len(names) == len(set(names))


def test_what_scales_itself_has_no_fixed_number_of_replicas() -> None:
    for name in ("ha", "h100-tp8"):
        objects = rendered(profile(name))
        scaled = {
            found["spec"]["scaleTargetRef"]["name"]
            for found in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject")
        }
        assert scaled
        for found in of_kind(objects, "Deployment"):
            assert ("replicas" in found["spec"]) is (found["metadata"]["name"] not in scaled)


@pytest.mark.parametrize("mode", ["ray", *MODES])
def test_a_url_from_a_secret_is_on_no_command_line(mode: str) -> None:
    values = {"controller": {"mode": mode}, "redis": {"enabled": False, "urlSecret": "hidden"}}
    told = [one for one in containers(rendered(values)) if "outrider" in str(one.get("command"))]
    assert len(told) >= 4
    for container in told:
        (variable,) = [one for one in container["env"] if one["name"] == "OUTRIDER_METADATA"]
        assert variable["valueFrom"] == {"secretKeyRef": {"name": "hidden", "key": "url"}}
        assert not [word for word in container["args"] if word == "--metadata" or "$(OUTRIDER" in word]


@pytest.mark.parametrize("mode", ["ray", *MODES])
def test_a_node_can_be_drained_of_a_controllers_pods_one_at_a_time(mode: str) -> None:
    objects = rendered({"controller": {"mode": mode, "ray": {"workers": 3}}})
    (budget,) = [one for one in of_kind(objects, "PodDisruptionBudget") if _name(one) == "demo-controller"]
    chosen = budget["spec"]["selector"]["matchLabels"].items()
    owners = [one for one in objects if any(chosen <= pod["metadata"]["labels"].items() for pod in pods_of(one))]
    if {one["kind"] for one in owners} <= {"Deployment", "StatefulSet"}:
        assert budget["spec"]["maxUnavailable"] == 1
    else:
        # What has no subresource for scale needs a number of pods that stay: here of a head and three workers.
        assert budget["spec"].get("maxUnavailable") is None and budget["spec"]["minAvailable"] == 3


def test_a_pool_of_no_replicas_has_none() -> None:
    objects = rendered({"drafts": {"main": {"replicas": 0}}})
    replicas = {_name(one): one["spec"]["replicas"] for one in of_kind(objects, "Deployment")}
    assert replicas == {"demo-target-main": 1, "demo-draft-main": 0, "demo-gateway": 1}


@pytest.mark.parametrize("mode", ["ray", *MODES])
def test_prometheus_is_sent_to_ports_alone_that_the_pod_itself_is_asked_about(mode: str) -> None:
    """So that none is down while all is well."""
    values = {"controller": {"mode": mode, "routers": 2}, "monitoring": {"podMonitor": {"enabled": True}}}
    objects = rendered(values)
    (monitor,) = of_kind(objects, "PodMonitor")
    scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    seen = set()
    for labels, spec in pod_specs(objects):
        probes = str([one.get(kind) for one in spec["containers"] for kind in ("startupProbe", "livenessProbe")])
        for port in (port["name"] for one in spec["containers"] for port in one.get("ports", ())):
            if port in scraped:
                seen.add(labels[ROLE])
                # A pod with a Ray of its own ends with it, and its routers start again within a moment.
                assert f"'{port}'" in probes or (mode == "ray" and port.startswith("router-ops-"))
    assert seen == {"gateway", "target", "draft"} | (set() if mode in RAY_MODES else {"controller"})


def test_pools_scale_by_what_their_own_pods_count_or_by_what_others_count_of_them() -> None:
    own: dict[str, Any] = {**SCALING, "metric": "outrider_draft_num_requests_running"}
    of_others: dict[str, Any] = {
        "enabled": True,
        "minReplicas": 1,
        "maxReplicas": 2,
        "metric": "outrider_num_requests_running",
        "value": "700m",
    }
    of_others["selector"] = {"draft": "d"}
    for scaling, kind in ((own, "Pods"), (of_others, "External")):
        objects = rendered({"drafts": {"main": {"autoscaling": scaling}}})
        (scaler,) = of_kind(objects, "HorizontalPodAutoscaler")
        (metric,) = scaler["spec"]["metrics"]
        assert metric["type"] == kind and metric[kind.lower()]["metric"]["name"] == scaling["metric"]
        assert metric[kind.lower()]["metric"].get("selector", {}).get("matchLabels") == scaling.get("selector")
        assert problems(scaler, versions()[-1]) == []
    queries = []
    for trigger in (
        {"metric": "outrider_num_requests_running"},
        {"query": 'avg(outrider_y{namespace="{{ .Release.Namespace }}"})'},
    ):
        keda = {"enabled": True, "minReplicas": 1, "maxReplicas": 2, "threshold": "5", **trigger}
        (scaled,) = of_kind(rendered({"targets": {"main": {"keda": keda}}}), "ScaledObject")
        queries.append(scaled["spec"]["triggers"][0]["metadata"]["query"])
    assert queries == [
        'sum(outrider_num_requests_running{namespace="llm",pod=~"demo-target-main-[a-z0-9]+-[a-z0-9]{5}"})',
        'avg(outrider_y{namespace="llm"})',
    ]


def test_a_redis_with_sentinels_is_taken_and_reached() -> None:
    for scheme in ("redis+sentinel", "rediss+sentinel"):
        url = f"{scheme}://outrider@sentinel-0:26379,sentinel-1:26379/main?password_file=/run/secrets/redis/password"
        values = {"redis": {"enabled": False, "url": url}}
        assert not refused(values)
        objects = rendered(values)
        for role in ("gateway", "controller", "target", "draft"):
            allowed = let_out(objects, pods(objects)[role], Peer(address="203.0.113.7"))
            assert {("TCP", 6379, 6379), ("TCP", 26379, 26379)} <= set(allowed)


@pytest.mark.parametrize("name", ["ha", "h100-tp8", "everything", "everything-kuberay"])
def test_a_prometheus_in_another_namespace_reaches_what_the_podmonitor_names_and_nothing_else(name: str) -> None:
    objects = rendered(profile(name))
    (monitor,) = of_kind(objects, "PodMonitor")
    scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    prometheus = Peer({}, "monitoring")
    for role, pod in pods(objects).items():
        if role in ("redis", "test"):
            assert not let_in(objects, prometheus, pod)
            continue
        ports = [port for one in _containers_of(objects, role) for port in one.get("ports", ())]
        named = {port["containerPort"] for port in ports if port["name"] in scraped}
        ranges = let_in(objects, prometheus, pod)
        allowed = {number for _, first, last in ranges for number in range(first, last + 1)}
        assert {protocol for protocol, _, _ in ranges} == {"TCP"}
        # Clients are the gateway's; on a Ray cluster the control plane's port has no name.
        assert allowed - {8000, 8001} == named or (allowed == {9009} and not named)


def _containers_of(objects: list[Object], role: str) -> list[Object]:
    return [one for labels, spec in pod_specs(objects) if labels[ROLE] == role for one in spec["containers"]]


@pytest.mark.parametrize("mode", RAY_MODES)
def test_rays_own_ports_are_below_those_that_a_system_chooses_for_routers(mode: str) -> None:
    flags = [flag for _, flags in _ray_flags(rendered({"controller": {"mode": mode}})) for flag in flags]
    values = {flag.rpartition("=")[2] for flag in flags if "port=" in flag}
    assert len(values) > 5 and max(map(int, values)) < 32768


def test_the_profile_of_h100s_names_what_it_needs_and_puts_drafts_beside_their_targets() -> None:
    text = (CHART / "values-h100-tp8.yaml").read_text()
    comment = " ".join(line for line in text.splitlines() if line.startswith("#"))
    objects = rendered_as_given(pushed(profile("h100-tp8")))
    found = str(objects)
    for name in {*re.findall(r"'(?:secretName|claimName)': '([^']+)'", found), "outrider-redis"}:
        assert f'"{name}"' in comment, name
    assert "T4" not in text
    templates = {
        one["metadata"]["name"]: one["spec"]["template"] for one in of_kind(objects, "Deployment", "StatefulSet")
    }
    target, draft = templates["demo-target-main"], templates["demo-draft-main"]["spec"]
    assert target["spec"]["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge"}
    (beside,) = draft["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert beside["topologyKey"] == "topology.kubernetes.io/zone"
    assert beside["labelSelector"]["matchLabels"].items() <= target["metadata"]["labels"].items()


def test_the_profile_of_h100s_is_a_pair_that_docs_benchmarks_computes() -> None:
    text = (CHART / "values-h100-tp8.yaml").read_text()
    pair = next(pair for pair in PAIRS if f"({pair.name})" in text)
    values = profile("h100-tp8")
    target, draft = values["targets"]["main"], values["drafts"]["main"]
    assert (pair.target.gpus, pair.draft.gpus) == (target["gpus"], draft["gpus"]) == (target["tensorParallel"], 1)
    assert (pair.target.model, pair.draft.model) == (LLAMA_70B, LLAMA_1B)
    assert "70b" in target["model"] and "1b" in draft["model"]
    assert "ngram" in target["args"][target["args"].index("--lookups") + 1]


def test_the_test_of_a_release_asks_with_the_key_in_a_secret() -> None:
    (container,) = [one for one in containers(rendered({"tests": {"apiKeySecret": "mine"}})) if one["name"] == "test"]
    (key,) = [variable for variable in container["env"] if variable["name"] == "API_KEY"]
    assert key["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "key"}


def test_a_digest_goes_before_the_tag() -> None:
    digest = f"sha256:{'a' * 64}"
    images = {one["name"]: one["image"] for one in containers(rendered({"image": {"digests": {"target": digest}}}))}
    assert images["target"].endswith(f"outrider-target@{digest}")
    assert images["draft"].endswith("outrider-draft:0.1.0")


def test_a_target_on_vllm_has_an_image_of_its_own_and_says_so_to_its_process() -> None:
    pools = {"main": {"model": "smollm2-135m-instruct", "engine": "vllm"}, "own": {"model": "smollm2-135m-instruct"}}
    found = {
        one["image"].rpartition(":")[0].rpartition("/")[2]: one["args"]
        for one in containers(rendered({"targets": pools}))
        if one["name"] == "target"
    }
    assert set(found) == {"outrider-vllm", "outrider-target"}
    engine = found["outrider-vllm"].index("--engine")
    assert found["outrider-vllm"][engine + 1] == "vllm"
    assert "--engine" not in found["outrider-target"]


def test_a_tensor_parallel_pod_takes_all_gpus_of_its_group() -> None:
    target = next(one for one in containers(rendered(profile("h100-tp8"))) if one["name"] == "target")
    assert target["resources"]["limits"]["nvidia.com/gpu"] == target["resources"]["requests"]["nvidia.com/gpu"] == "8"
    assert target["args"][target["args"].index("--tensor-parallel") + 1] == "8"
    assert target["args"][target["args"].index("--device") + 1] == "cuda"
    assert target["args"][target["args"].index("--engine") + 1] == "vllm"


def test_objects_of_the_operators_own_are_rendered_as_templates() -> None:
    extra = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-own"}}
    assert "demo-own" in {found["metadata"]["name"] for found in rendered({"extraObjects": [extra]})}
