"""From one set of values to another and back, as Helm does it on an API that refuses what Kubernetes refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.unit.deploy.chart import CASES, Object, profile, rendered

Name = tuple[str, str]
# What an API server refuses to change in place, by kind.
IMMUTABLE: dict[str, tuple[str, ...]] = {
    "Deployment": ("spec.selector",),
    "StatefulSet": (
        "spec.selector",
        "spec.serviceName",
        "spec.podManagementPolicy",
        "spec.volumeClaimTemplates",
    ),
    "Service": ("spec.clusterIP",),
    "Secret": ("type", "immutable"),
}


class Refused(Exception):
    """The API's answer to a change that it does not admit."""


class Cluster:
    """An API server that keeps objects, and Helm's way with it: it deletes what the new release lacks, but for what is
    told to stay."""

    def __init__(self) -> None:
        self.objects: dict[Name, Object] = {}
        self._released: set[Name] = set()

    def upgrade(self, objects: list[Object]) -> None:
        """Also the first one. Raises Refused."""
        wanted = {_name(found): found for found in self._looked_up(objects)}
        for name, found in wanted.items():
            self._apply(name, found)
        for name in self._released - wanted.keys():
            if not _stays(self.objects[name]):
                del self.objects[name]
        self._released = set(wanted)

    def uninstall(self) -> None:
        self.objects = {name: found for name, found in self.objects.items() if _stays(found)}
        self._released = set()

    def _looked_up(self, objects: list[Object]) -> Iterator[Object]:
        for found in objects:
            # A secret that is drawn once is found again by `lookup`.
            old = self.objects.get(_name(found))
            yield old if old is not None and _stays(found) else found

    def _apply(self, name: Name, found: Object) -> None:
        if (old := self.objects.get(name)) is not None:
            for path in IMMUTABLE.get(name[0], ()):
                if _at(old, path) != _at(found, path):
                    raise Refused(f"{'/'.join(name)}: {path} is immutable")
        self.objects[name] = json.loads(json.dumps(found))


def _name(found: Object) -> Name:
    return found["kind"], found["metadata"]["name"]


def _stays(found: Object) -> bool:
    policy: str = found["metadata"].get("annotations", {}).get("helm.sh/resource-policy", "")
    return policy == "keep"


def _at(found: Any, path: str) -> Any:
    for part in path.split("."):
        found = (found or {}).get(part)
    return found


def release(values: dict[str, Any]) -> list[Object]:
    """Without hooks, which are no part of one."""
    return [found for found in rendered(values) if "helm.sh/hook" not in found["metadata"].get("annotations", {})]


@cache
def _case(name: str) -> list[Object]:
    return release(profile(name))


def _names(objects: list[Object]) -> set[Name]:
    return {_name(found) for found in objects}


@pytest.mark.parametrize("before", CASES)
def test_an_upgrade_to_any_other_and_its_rollback_leave_nothing_behind(before: str) -> None:
    for after in CASES:
        cluster = Cluster()
        cluster.upgrade(_case(before))
        first = dict(cluster.objects)
        cluster.upgrade(_case(after))
        kept = {name for name, found in cluster.objects.items() if _stays(found)}
        assert cluster.objects.keys() - kept == _names(_case(after)) - kept
        cluster.upgrade(_case(before))
        assert cluster.objects.keys() - kept == first.keys() - kept
        assert all(cluster.objects[name] == first[name] for name in first)
        cluster.uninstall()
        assert all(found["kind"] == "Secret" for found in cluster.objects.values())


def test_a_change_that_the_api_refuses_is_found() -> None:
    cluster = Cluster()
    cluster.upgrade(release({}))
    with pytest.raises(Refused, match="volumeClaimTemplates"):
        cluster.upgrade(release({"redis": {"storage": {"size": "2Gi"}}}))
