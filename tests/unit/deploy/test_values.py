"""Random values that the schema admits: the chart renders them, and Kubernetes admits what it renders."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.deploy.chart import CHART, problems, refused, rendered, versions

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
# Kubernetes' own objects: their shape is Kubernetes' matter, and random ones are refused by its schema.
_FOREIGN = {"affinity", "tolerations", "env", "clients", "operators", "prometheus", "extraObjects", "global"}
_FOREIGN |= {"query", "egress", "extraVolumes", "extraVolumeMounts", "initContainers", "topologySpreadConstraints"}
_NEEDED = (
    "controller.cacheSaltSecret",
    "controller.replicas",
    "redis: enabled",
    "gateway.ingress.host",
    "tlsSecrets",
    ".gpus: ",
    ".keda: ",
    ".autoscaling: ",
)


def values_of(schema: dict[str, Any], name: str = "") -> st.SearchStrategy[Any]:
    """What this schema admits; only the parts of JSON schema that ours uses."""
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
        needed = {key: own.pop(key) for key in schema.get("required", ())}
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


def check(values: dict[str, Any]) -> None:
    from helm_python import HelmRenderError

    assert refused(values) == ""
    try:
        objects = rendered(values)
    except HelmRenderError as error:
        # What one value lacks because of another is said by name.
        assert any(needed in str(error) for needed in _NEEDED), error
        return
    assert [problem for found in objects for problem in problems(found, versions()[-1])] == []


_QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@settings(max_examples=50, deadline=None, suppress_health_check=_QUIET)
@given(values_of(SCHEMA))
def test_some_random_values_become_objects_that_kubernetes_admits(values: dict[str, Any]) -> None:
    check(values)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=2000, deadline=None, suppress_health_check=_QUIET)
@given(values_of(SCHEMA))
def test_many_random_values_become_objects_that_kubernetes_admits(values: dict[str, Any]) -> None:
    check(values)
