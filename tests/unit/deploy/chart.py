"""The chart, rendered by Helm's own code, and Kubernetes' schemas to judge it by.

Both are imported where they are used, so that an environment from before them still collects all other tests.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

DEPLOY = Path(__file__).parents[3] / "deploy"
CHART = DEPLOY / "k8s"
_BY = {"enabled": True, "minReplicas": 1, "maxReplicas": 2, "metric": "outrider_num_requests_running"}
SCALING = {**_BY, "averageValue": "1"}
KEDA = {**_BY, "threshold": "5"}


class Loader(yaml.CSafeLoader):
    """As Kubernetes reads: a bare `=` is a string."""


Loader.add_constructor("tag:yaml.org,2002:value", lambda loader, node: node.value)

PROFILES = ("default", *sorted(path.stem.removeprefix("values-") for path in CHART.glob("values-*.yaml")))
OLDEST = "1.27.0"
CUSTOM_KINDS: dict[str, dict[str, Any]] = yaml.load(
    (Path(__file__).parent / "custom-kinds.yaml").read_text(), yaml.CSafeLoader
)
RAY_MODES = ("ray-cluster", "kuberay")
MODES = ("plain", *RAY_MODES)
OTHERS = yaml.load((Path(__file__).parent / "cases.yaml").read_text(), yaml.CSafeLoader)
"""Values by the name of a case: what no profile has on."""
CASES = (*PROFILES, *MODES, *OTHERS)

Object = dict[str, Any]


def profile(name: str) -> dict[str, Any]:
    """Values of a case: of a profile, of a mode, or of what no profile has on; none for the default."""
    if name == "default":
        return {}
    if name in MODES:
        return {"controller": {"mode": name}, "monitoring": {"podMonitor": {"enabled": True}}}
    values: dict[str, Any] = OTHERS.get(name) or yaml.safe_load((CHART / f"values-{name}.yaml").read_text())
    return values


@cache
def _chart() -> Any:
    from helm_python import Chart

    return Chart.load(CHART)


def pushed(values: Mapping[str, Any]) -> dict[str, Any]:
    """With the registry that has the images."""
    return {**values, "image": {"registry": "registry.example", **values.get("image", {})}}


def on_demo(values: Mapping[str, Any]) -> dict[str, Any]:
    """With the demo's pools where the values only say what is different in one of them, and have no model."""
    given = {role: values.get(f"{role}s", {}) for role in ("target", "draft")}
    if all("model" in pool for pools in given.values() for pool in pools.values()):
        return {**values}
    demo = yaml.safe_load((CHART / "demo.yaml").read_text())
    pools = {f"{role}s": {"main": {**own["main"], **given[role].get("main", {})}} for role, own in demo.items()}
    return {**values, **pools}


def needed(values: Mapping[str, Any]) -> dict[str, Any]:
    """With a registry; and, for Helm without a cluster, with the secrets that it would draw anew each time."""
    controller = values.get("controller", {})
    ray = {"tokenSecret": "outrider-ray"} | {k: v for k, v in controller.get("ray", {}).items() if v != ""}
    salt = controller.get("cacheSaltSecret") or "outrider-salt"
    return pushed({**values, "controller": {**controller, "ray": ray, "cacheSaltSecret": salt}})


def rendered(values: Mapping[str, Any]) -> list[Object]:
    """Every object of a release "demo" in the namespace "llm", with what is needed. Raises HelmError."""
    return rendered_as_given(needed(on_demo(values)))


def rendered_as_given(values: Mapping[str, Any]) -> list[Object]:
    return copy.deepcopy(_objects(json.dumps(values)))


@cache
def _objects(values: str) -> list[Object]:
    texts: dict[str, str] = _chart().render(json.loads(values), name="demo", namespace="llm")
    manifests = (text for path, text in texts.items() if not path.endswith("NOTES.txt"))
    return [found for text in manifests for found in yaml.load_all(text, Loader) if found]


def notes(values: Mapping[str, Any]) -> str:
    texts: dict[str, str] = _chart().render(needed(on_demo(values)), name="demo", namespace="llm")
    return texts["outrider/templates/NOTES.txt"]


def refused(values: Mapping[str, Any]) -> str:
    """What Helm says against values, by the chart's schema; empty when nothing."""
    from helm_python import HelmValuesError

    try:
        _chart().validate_schema(dict(values))
    except HelmValuesError as error:
        return str(error)
    return ""


def versions() -> list[str]:
    """Of Kubernetes, from the oldest that the chart admits to the newest with a schema here."""
    found = {entry.name.removeprefix("v").removesuffix("-local-strict") for entry in _schemas().iterdir()}
    every = sorted((name for name in found if "local" not in name), key=_order)
    return every[every.index(OLDEST) :]


def _schemas() -> Traversable:
    return files("kubernetes_validate") / "kubernetes-json-schema"


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def problems(found: Object, version: str) -> list[str]:
    """What the schema of that Kubernetes, which admits no unknown field, says against an object."""
    errors = _validator(found["apiVersion"], found["kind"], version).iter_errors(found)
    return [f"{found['kind']} {'.'.join(map(str, error.path))}: {error.message[:200]}" for error in errors]


@cache
def _validator(api_version: str, kind: str, version: str) -> jsonschema.Draft202012Validator:
    """Raises FileNotFoundError for what Kubernetes does not know."""
    group, _, api = api_version.rpartition("/")
    if kind in CUSTOM_KINDS:
        schema = _closed(kind)
    else:
        schema = _read(f"{kind}-{group.split('.')[0]}-{api}".lower() if group else f"{kind}-{api}".lower(), version)
    return jsonschema.Draft202012Validator(schema, registry=_registry(version))


def _closed(kind: str) -> Object:
    own = CUSTOM_KINDS[kind]
    metadata = {"$ref": "/api/_definitions.json#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
    spec = {"type": "object", "additionalProperties": False, **own["spec"]}
    fields = {"apiVersion": {"const": own["apiVersion"]}, "kind": {"const": kind}, "metadata": metadata, "spec": spec}
    return {"type": "object", "additionalProperties": False, "required": list(fields), "properties": fields}


@cache
def _registry(version: str) -> Registry[Any]:
    definitions = Resource.from_contents(_read("_definitions", version), default_specification=DRAFT202012)
    # Crawled once: a lookup would do it each time.
    crawled: Registry[Any] = Registry().with_resource("/api/_definitions.json", definitions).crawl()
    return crawled


def _read(name: str, version: str) -> Any:
    return json.loads((_schemas() / f"v{version}-local-strict" / f"{name}.json").read_text())


def pod_specs(objects: list[Object]) -> Iterator[tuple[Object, Object]]:
    """Labels and spec of every pod that the objects make."""
    for found in objects:
        for pod in [found] if found["kind"] == "Pod" else pods_of(found):
            yield pod["metadata"]["labels"], pod["spec"]


def pods_of(found: Object) -> list[Object]:
    """Of the pods that a workload makes."""
    spec = found.get("spec", {})
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]] if found["kind"] == "RayCluster" else [spec]
    return [group["template"] for group in groups if "template" in group]


def containers(objects: list[Object]) -> list[Object]:
    return [container for _, spec in pod_specs(objects) for container in spec["containers"]]


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [found for found in objects if found["kind"] in kinds]
