"""From one set of values to another and back: by Helm itself, on an API that refuses what Kubernetes refuses."""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.deploy.api_server import ApiServer, Name
from tests.unit.deploy.chart import CASES, CHART, Object, profile, pushed, rendered


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer.running() as running:
        yield running


@pytest.fixture
def helm(api: ApiServer) -> Any:
    from helm_python import Config

    return Config(kubeconfig_content=api.kubeconfig, namespace="llm", storage_driver="memory")


def _objects(api: ApiServer) -> dict[Name, Object]:
    """As they were applied; without secrets that stay when what needs them goes."""
    return {name: found for name, found in api.objects.items() if not _stays(found)}


def _stays(found: Object) -> bool:
    policy: str = found["metadata"].get("annotations", {}).get("helm.sh/resource-policy", "")
    return policy == "keep"


def _names(values: dict[str, Any]) -> set[Name]:
    """Of a release: without hooks, which are no part of one, and what stays."""
    return {
        (found["kind"], found["metadata"]["name"])
        for found in rendered(values)
        if "helm.sh/hook" not in found["metadata"].get("annotations", {}) and not _stays(found)
    }


def _applied(api: ApiServer, helm: Any, before: str, others: list[str]) -> Iterator[tuple[str, set[Name]]]:
    """The name of a case and the objects that are there: after the install, each upgrade, and the rollback from it."""
    helm.install(CHART, "demo", pushed(profile(before)), timeout=60)
    yield before, set(_objects(api))
    for after in others:
        # Where no values are given, Helm would take the last ones.
        helm.upgrade(CHART, "demo", pushed(profile(after)), reset_values=True, timeout=60)
        yield after, set(_objects(api))
        helm.rollback("demo", version=1, timeout=60)
        yield before, set(_objects(api))


def test_an_upgrade_and_its_rollback_leave_nothing_behind(api: ApiServer, helm: Any) -> None:
    first: dict[Name, Object] = {}
    for case, there in _applied(api, helm, "default", ["everything-kuberay"]):
        assert there == _names(profile(case))
        first = first or copy.deepcopy(api.objects)
    assert {name: api.objects[name] for name in first} == first
    assert helm.history("demo")[-1]["revision"] == 3
    helm.uninstall("demo", timeout=60)
    assert _objects(api) == {}
    assert {found["kind"] for found in api.objects.values()} <= {"Secret"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("before", CASES)
def test_an_upgrade_from_any_case_to_any_other_and_its_rollback_leave_nothing_behind(
    before: str, api: ApiServer, helm: Any
) -> None:
    others = [name for name in CASES if name != before]
    first: dict[Name, Object] = {}
    for case, there in _applied(api, helm, before, others):
        assert there == _names(profile(case))
        if case == before:
            first = first or copy.deepcopy(api.objects)
            assert {name: api.objects[name] for name in first} == first
    assert helm.history("demo")[-1]["revision"] == 1 + 2 * len(others)
    helm.uninstall("demo", timeout=60)
    assert _objects(api) == {}


def test_what_is_drawn_once_is_found_again(api: ApiServer, helm: Any) -> None:
    """Another salt would empty every cache, and another token would part Ray's nodes."""
    values = {"controller": {"mode": "ray-cluster"}}
    helm.install(CHART, "demo", pushed(values), timeout=60)
    drawn = {name: found["data"] for name, found in api.objects.items() if _stays(found)}
    assert {name for _, name in drawn} == {"demo-controller-salt", "demo-controller-ray-token"}
    assert all(len(base64.b64decode(value)) == 43 for data in drawn.values() for value in data.values())
    helm.upgrade(CHART, "demo", pushed({**values, "logFormat": "human"}), timeout=60)
    helm.uninstall("demo", timeout=60)
    helm.install(CHART, "demo", pushed(values), timeout=60)
    assert {name: api.objects[name]["data"] for name in drawn} == drawn
