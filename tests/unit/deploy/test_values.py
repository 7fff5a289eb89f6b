"""Random values that the schema admits: the chart renders them, and Kubernetes admits what it renders."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.deploy.chart import CHART, MODES, RAY_MODES, problems, refused, rendered, versions

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
# Kubernetes' own objects: their shape is Kubernetes' matter, and random ones are refused by its schema.
_FOREIGN = {"affinity", "tolerations", "env", "clients", "operators", "servers", "prometheus", "extraObjects", "global"}
_FOREIGN |= {"query", "egress", "extraVolumes", "extraVolumeMounts", "initContainers", "topologySpreadConstraints"}
_NEEDED = (
    "image.registry",
    "controller.cacheSaltSecret",
    "controller.replicas",
    "redis: ",
    "gateway.ingress.host",
    "tlsSecrets",
    "certManager.renewBefore: ",
    "gateway.autoscaling: ",
    ".path: ",
    ".gpus: ",
    ".tensorParallel: ",
    ".keda: ",
    ".autoscaling: ",
)
# What makes an object of its own: left to chance in each of its levels, hardly any would be rendered.
_ALWAYS = {"enabled", "claim", "autoscaling", "keda", "podMonitor", "rules", "dashboards", "ingress"}
_ALWAYS |= {"cache", "monitoring", "certManager", "gateway", "targets", "drafts", "controller"}


def values_of(schema: dict[str, Any], name: str = "") -> st.SearchStrategy[Any]:
    """What this schema admits; only the parts of JSON schema that ours uses."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].removeprefix("#/definitions/")]
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema["type"] if isinstance(schema["type"], str) else schema["type"][0]
    if kind == "boolean":
        return st.booleans()
    if kind == "integer":
        # A thousand routers are as good as a hundred million, and sooner rendered.
        return st.integers(schema["minimum"], min(schema.get("maximum", 100), schema["minimum"] + 70))
    if kind == "array":
        return st.lists(values_of(schema["items"]), max_size=2)
    if kind == "string":
        return _text(schema, name)
    if "properties" in schema:
        own = {key: values_of(of, key) for key, of in schema["properties"].items() if key not in _FOREIGN}
        # Also what only values that are on need.
        required = {*schema.get("required", ()), *schema.get("then", {}).get("required", ())}
        needed = {key: own.pop(key) for key in own.keys() & {*required, *_ALWAYS}}
        return st.fixed_dictionaries(needed, optional=own)
    keys = _text(schema.get("propertyNames", {"pattern": "^[a-z][a-z0-9]{0,10}$"}), name)
    return st.dictionaries(
        keys, values_of(schema["additionalProperties"]), max_size=2, min_size=schema.get("minProperties", 0)
    )


def _text(schema: dict[str, Any], name: str) -> st.SearchStrategy[str]:
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if name in ("priorityClassName", "runtimeClassName", "className", "storageClass"):
        return st.sampled_from(["", "fast"])
    pattern = schema.get("pattern")
    if pattern is None:
        return st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=12)
    return st.from_regex(pattern, fullmatch=True, alphabet=st.characters(min_codepoint=33, max_codepoint=126)).filter(
        lambda text: len(text) < 40
    )


@cache
def _all_values() -> st.SearchStrategy[Any]:
    """Made once: what Hypothesis finds out of a strategy it keeps there."""
    return values_of(SCHEMA)


@st.composite
def whole_values(draw: st.DrawFn, mode: str) -> dict[str, Any]:
    """Of that mode; where one value needs another, mostly with it."""
    values: dict[str, Any] = draw(_all_values())
    values["controller"]["mode"] = mode
    if draw(st.integers(0, 9)) != 9:
        _complete(values)
        for pool in [*values["targets"].values(), *values["drafts"].values()]:
            _complete_pool(pool, keda=draw(st.booleans()))
            if mode in RAY_MODES:
                # Of what controllers tell Prometheus has nothing there.
                for scaling in (pool["autoscaling"], pool["keda"]):
                    scaling.update({"metric": "outrider_num_requests_running"} if "metric" in scaling else {})
    return values


def _complete(values: dict[str, Any]) -> None:
    redis, controller, ingress = values.get("redis", {}), values["controller"], values["gateway"]["ingress"]
    if redis.get("enabled", True) or redis.get("url"):
        redis["urlSecret"] = ""
    else:
        redis["urlSecret"] = redis.get("urlSecret") or "redis"
    if redis.get("enabled", True):
        redis["url"] = ""
    if controller["mode"] in RAY_MODES:
        controller["replicas"] = 1
    if controller.get("replicas", 1) > 1:
        controller["cacheSaltSecret"] = controller.get("cacheSaltSecret") or "salt"
    values["image"] = {**values.get("image", {}), "registry": values.get("image", {}).get("registry") or "example.org"}
    values["models"] = {**values.get("models", {}), "existingClaim": "models"}
    _in_order(values["gateway"]["autoscaling"], 2, 8)
    ingress["host"] = ingress.get("host") or "api.example.org"
    roles = dict.fromkeys(("gateway", "controller", "target", "draft"), "")
    secrets = values.get("tlsSecrets", {})
    if values["certManager"]["enabled"]:
        secrets |= roles
        values["certManager"] |= {"duration": "48h", "renewBefore": "24h"}
    elif any(secrets.get(role) for role in roles):
        secrets |= {role: secrets.get(role) or f"tls-{role}" for role in roles}


def _complete_pool(pool: dict[str, Any], keda: bool) -> None:
    if "tensorParallel" in pool:
        pool["engine"] = "vllm"
    if "gpus" in pool:
        pool["gpus"] = pool.get("tensorParallel", 1)
    if pool["keda"]["enabled"] and pool["autoscaling"]["enabled"]:
        pool["autoscaling" if keda else "keda"]["enabled"] = False
    scaling, by = pool["autoscaling"], pool["keda"]
    by.setdefault("metric", "outrider_num_requests_running")
    if by.get("query"):
        del by["metric"]
    by["minReplicas"] = max(1, by["minReplicas"])
    for bounds in (scaling, by):
        _in_order(bounds, 1, 1)
    if scaling.get("value"):
        scaling["averageValue"] = ""
    else:
        scaling["averageValue"], scaling["selector"] = scaling.get("averageValue") or "5", {}


def _in_order(bounds: dict[str, Any], least: int, most: int) -> None:
    bounds["maxReplicas"] = max(bounds.get("minReplicas", least), bounds.get("maxReplicas", most))


def check(values: dict[str, Any]) -> set[str]:
    """The kinds that are rendered; none where a value lacks another."""
    from helm_python import HelmRenderError

    assert refused(values) == ""
    try:
        objects = rendered(values)
    except HelmRenderError as error:
        # What one value lacks because of another is said by name.
        assert any(needed in str(error) for needed in _NEEDED), error
        return set()
    assert [problem for found in objects for problem in problems(found, versions()[-1])] == []
    return {found["kind"] for found in objects}


_QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
# In each mode one in twenty of the values that are rendered makes one, at least.
_OFTEN = 0.05
_KINDS = ("StatefulSet", "NetworkPolicy", "PersistentVolumeClaim", "Ingress", "HorizontalPodAutoscaler")
_KINDS += ("ScaledObject", "PodMonitor", "PrometheusRule", "ConfigMap", "Certificate", "Issuer")


def _random(mode: str, count: int) -> tuple[int, int, Counter[str]]:
    """Values that were drawn, those that were rendered, and how many of them made an object of a kind."""
    drawn, kinds = 0, Counter[str]()

    @settings(max_examples=count, suppress_health_check=_QUIET, database=None)
    @given(whole_values(mode))
    def each(values: dict[str, Any]) -> None:
        nonlocal drawn
        drawn += 1
        kinds.update(check(values))

    each()
    return drawn, kinds["Deployment"], kinds


@pytest.mark.parametrize("mode", ["ray", *MODES])
def test_some_random_values_become_objects_that_kubernetes_admits(mode: str) -> None:
    drawn, num_rendered, _ = _random(mode, 2)
    assert drawn >= 2 and num_rendered


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["ray", *MODES])
def test_many_random_values_become_objects_that_kubernetes_admits(mode: str) -> None:
    """2,000 in the four modes."""
    drawn, num_rendered, kinds = _random(mode, 500)
    assert drawn >= 500 and num_rendered >= 0.8 * drawn
    kinds_of_mode = (*_KINDS, "RayCluster") if mode == "kuberay" else _KINDS
    assert not {kind: kinds[kind] for kind in kinds_of_mode if kinds[kind] < _OFTEN * num_rendered}, num_rendered
