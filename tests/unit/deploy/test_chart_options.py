"""Values of the chart that no profile sets, and what each changes."""

from __future__ import annotations

import pytest

from tests.unit.deploy.chart import CASES, Object, of_kind, pods_of, profile, rendered

_ROLE = "app.kubernetes.io/component"


def workload(objects: list[Object], name: str) -> Object:
    (found,) = [one for one in of_kind(objects, "Deployment", "StatefulSet") if one["metadata"]["name"] == name]
    return found


def container(objects: list[Object], name: str) -> Object:
    """The first of a workload's pods."""
    found: Object = pods_of(workload(objects, name))[0]["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("name", CASES)
def test_nothing_ends_a_gateway_that_waits_for_models_to_load(name: str) -> None:
    objects = rendered(profile(name))
    gateway = container(objects, "demo-gateway")
    # Without a target /readyz is 503: that of the startup probe would restart it meanwhile.
    assert gateway["startupProbe"]["httpGet"]["path"] == gateway["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/readyz"


@pytest.mark.parametrize("name", CASES)
def test_a_rollout_waits_for_the_longest_start(name: str) -> None:
    objects = rendered(profile(name))
    deployments = {one["metadata"]["labels"][_ROLE]: one for one in of_kind(objects, "Deployment")}
    longest = {}
    for role in ("target", "draft"):
        probe = pods_of(deployments[role])[0]["spec"]["containers"][0]["startupProbe"]
        longest[role] = probe["periodSeconds"] * probe["failureThreshold"]
        assert deployments[role]["spec"]["progressDeadlineSeconds"] > longest[role]
    assert deployments["gateway"]["spec"]["progressDeadlineSeconds"] > longest["target"]
