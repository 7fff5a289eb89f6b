"""As much of Kubernetes' API as Helm asks for: it keeps objects, and refuses the changes that Kubernetes refuses.

It runs nothing, and sets no defaults. Who applies an object owns all of its fields, as here nobody else writes any.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

from tests.unit.deploy.chart import Object

# Groups with their version, and the kinds of each.
RESOURCES = {
    "v1": ("Service", "Secret", "ConfigMap", "PersistentVolumeClaim", "Pod", "Namespace", "ServiceAccount"),
    "apps/v1": ("Deployment", "StatefulSet", "ReplicaSet"),
    "policy/v1": ("PodDisruptionBudget",),
    "networking.k8s.io/v1": ("NetworkPolicy", "Ingress"),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "batch/v1": ("Job",),
    "monitoring.coreos.com/v1": ("PodMonitor", "PrometheusRule"),
    "keda.sh/v1alpha1": ("ScaledObject",),
    "cert-manager.io/v1": ("Certificate", "Issuer"),
    "ray.io/v1": ("RayCluster",),
    "apiregistration.k8s.io/v1": ("APIService",),
}
_PLURALS = {"NetworkPolicy": "networkpolicies", "Ingress": "ingresses"}
# What cannot be changed in place, by kind; of a StatefulSet's spec, all but what is named.
_IMMUTABLE: dict[str, tuple[str, ...]] = {
    "Deployment": ("spec.selector",),
    "Service": ("spec.clusterIP",),
    "Secret": ("type",),
    "PersistentVolumeClaim": ("spec.accessModes", "spec.storageClassName", "spec.volumeName", "spec.selector"),
    "RayCluster": (),
}
_MUTABLE_OF_A_STATEFUL_SET = {
    "replicas",
    "ordinals",
    "template",
    "updateStrategy",
    "revisionHistoryLimit",
    "persistentVolumeClaimRetentionPolicy",
    "minReadySeconds",
}

Name = tuple[str, str]


def plural(kind: str) -> str:
    return _PLURALS.get(kind, f"{kind.lower()}s")


def refusal(old: Object, new: Object) -> str:
    """Why a change is not admitted; empty: it is."""
    kind = new["kind"]
    changed = [path for path in _IMMUTABLE.get(kind, ()) if _at(old, path) != _at(new, path)]
    if kind == "StatefulSet":
        fields = (old["spec"].keys() | new["spec"].keys()) - _MUTABLE_OF_A_STATEFUL_SET
        changed = [f"spec.{one}" for one in sorted(fields) if old["spec"].get(one) != new["spec"].get(one)]
    return f"{kind}/{new['metadata']['name']}: immutable: {', '.join(changed)}" if changed else ""


def _at(found: Any, path: str) -> Any:
    for part in path.split("."):
        found = (found or {}).get(part)
    return found


class ApiServer:
    """Objects by kind and name, of one namespace."""

    def __init__(self) -> None:
        self.objects: dict[Name, Object] = {}
        self.url = ""

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[ApiServer]:
        api = cls()
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(api))
        api.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield api
        finally:
            server.shutdown()
            server.server_close()

    @property
    def kubeconfig(self) -> str:
        clusters = [{"name": "c", "cluster": {"server": self.url}}]
        contexts = [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "llm"}}]
        users = [{"name": "u", "user": {}}]
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "c"}
        return json.dumps({**config, "clusters": clusters, "contexts": contexts, "users": users})

    def answer(self, method: str, path: list[str], body: Any) -> tuple[int, Object]:
        if path == ["version"]:
            return 200, {"major": "1", "minor": "32", "gitVersion": "v1.32.0"}
        if path in (["api"], ["apis"]):
            return 200, self._discovered(core=path == ["api"])
        version, rest = ("v1", path[2:]) if path[0] == "api" else ("/".join(path[1:3]), path[3:])
        if path[0] not in ("api", "apis") or version not in RESOURCES:
            return _status(404, "NotFound")
        if not rest:
            return 200, _listed(version)
        if rest[0] == "namespaces":
            rest = rest[2:]
        kinds = [kind for kind in RESOURCES[version] if rest and plural(kind) == rest[0]]
        return (
            self._of_kind(method, kinds[0], rest[1] if len(rest) > 1 else "", body)
            if kinds
            else _status(404, "NotFound")
        )

    def _of_kind(self, method: str, kind: str, name: str, body: Any) -> tuple[int, Object]:
        key = (kind, name or (body or {}).get("metadata", {}).get("name", ""))
        old = self.objects.get(key)
        if method == "GET" and not name:
            items = [found for (of, _), found in self.objects.items() if of == kind]
            return 200, {
                "kind": f"{kind}List",
                "apiVersion": "v1",
                "metadata": {"resourceVersion": "1"},
                "items": items,
            }
        if method == "POST" and old is not None:
            return _status(409, "AlreadyExists")
        if method in ("GET", "DELETE", "PUT") and old is None:
            return _status(404, "NotFound")
        if method == "GET":
            return 200, self.objects[key]
        if method == "DELETE":
            del self.objects[key]
            return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        if old is not None and (reason := refusal(old, body)):
            return _status(422, "Invalid", reason)
        uid = {"uid": f"{kind}-{key[1]}", "namespace": "llm", "resourceVersion": "1"}
        self.objects[key] = {**body, "metadata": {**body["metadata"], **uid}}
        return 201 if old is None else 200, self.objects[key]

    @staticmethod
    def _discovered(core: bool) -> Object:
        groups: dict[str, Object] = {}
        for version in RESOURCES:
            group, _, number = version.rpartition("/")
            if core is not (group == ""):
                continue
            one = {"groupVersion": version, "version": number}
            groups[group] = {"name": group, "versions": [one], "preferredVersion": one}
        if core:
            return {"kind": "APIVersions", "versions": ["v1"]}
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": list(groups.values())}


def _listed(version: str) -> Object:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = [
        {
            "name": plural(kind),
            "singularName": kind.lower(),
            "namespaced": kind != "Namespace",
            "kind": kind,
            "verbs": verbs,
        }
        for kind in RESOURCES[version]
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def _status(code: int, reason: str, message: str = "") -> tuple[int, Object]:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
    return code, {**status, "message": message or reason}


def _handler(api: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # An answer in one packet: two would each wait for the other side's acknowledgement.
        wbufsize = -1

        def _do(self) -> None:
            sent = self.rfile.read(int(self.headers.get("content-length", 0)))
            kind = self.headers.get("content-type", "")
            if self.path.startswith("/openapi/v2"):
                # An empty document: chart.py has the schemas.
                self._answer(200, b"", "application/com.github.proto-openapi.spec.v2.v1.0+protobuf")
                return
            # Of patches, only those that apply an object as a whole.
            if self.command == "PATCH" and "apply-patch" not in kind:
                code, answer = _status(415, "UnsupportedMediaType", kind)
            else:
                path = self.path.partition("?")[0].strip("/").split("/")
                body = yaml.load(sent, yaml.CSafeLoader) if sent and self.command != "DELETE" else None
                code, answer = api.answer(self.command, path, body)
            self._answer(code, json.dumps(answer).encode(), "application/json")

        def _answer(self, code: int, text: bytes, kind: str) -> None:
            self.send_response(code)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _do

        def log_message(self, *arguments: object) -> None:
            """Not into the test's output."""

    return Handler
