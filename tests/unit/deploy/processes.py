"""What the containers of a rendering start, as a kubelet starts it: command, arguments and environment of each.

Below a directory lie the volumes that it mounts, with secrets as the operator has to make them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from outrider.draft.config import parse_arguments as parse_draft
from outrider.gateway.config import parse_arguments as parse_gateway
from outrider.target.config import parse_arguments as parse_target
from outrider_controller.config import parse_arguments as parse_controller
from outrider_controller.control.config import parse_arguments as parse_control
from outrider_controller.router.config import parse_arguments as parse_router

from tests.certificates import Cluster
from tests.unit.deploy.chart import DEPLOY, Object, of_kind, pod_specs

PARSERS: dict[str, Callable[[list[str]], Any]] = {
    "outrider.target": parse_target,
    "outrider.draft": parse_draft,
    "outrider.gateway": parse_gateway,
    "outrider_controller": parse_controller,
    "outrider_controller.control": parse_control,
    "outrider_controller.router": parse_router,
}
POD_IP = "10.1.2.3"
SECRETS: dict[str, dict[str, bytes]] = {
    "outrider-redis": {"url": b"rediss://outrider:p@redis.example:6380"},
    "outrider-salt": {"salt": b"s" * 32},
    "outrider-cluster": {"secret": b"c" * 32},
    "outrider-ray": {"token": b"t" * 32},
    "outrider-key": {"key": b"sk-1"},
}
"""Those of an operator: the keys that docs/deploy.md and values.yaml name, and no other."""
_TLS_SECRETS = {
    "outrider-tls-gateway": ["gateway.outrider"],
    "outrider-tls-controller": ["router.outrider", "control.outrider"],
    "outrider-tls-target": ["target.outrider"],
    "outrider-tls-draft": ["draft.outrider"],
    "outrider-tls-public": ["api.example.org"],
}
"""Of an operator too, by the names in their certificates."""

# Every machine has these itself.
_HERE = ("/tmp", "/dev/shm")


@dataclass(frozen=True, slots=True)
class Process:
    container: str
    image: str
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    root: str
    """Where its volumes lie."""

    @property
    def key(self) -> str:
        """The same for what starts the same, wherever its volumes lie here."""
        return json.dumps([self.module, self.arguments, dict(self.environment)], sort_keys=True).replace(self.root, "")

    def having(self, **variables: str) -> Process:
        return replace(self, environment={**self.environment, **variables})

    def without(self, *names: str) -> Process:
        """Without these variables, and flags with their values."""
        kept = {name: value for name, value in self.environment.items() if name not in names}
        places = [place for place, word in enumerate(self.arguments) if word in names]
        dropped = {*places, *(place + 1 for place in places)}
        arguments = tuple(word for place, word in enumerate(self.arguments) if place not in dropped)
        return replace(self, environment=kept, arguments=arguments)

    def check(self) -> subprocess.CompletedProcess[str]:
        """Of the program itself, in nothing but this environment."""
        argv = [sys.executable, "-m", self.module, *self.arguments, "--check-config"]
        return subprocess.run(argv, env=dict(self.environment), capture_output=True, text=True, timeout=300)


def parsed(process: Process) -> Any:
    """Its configuration, by its own parser, in nothing but its environment."""
    with mock.patch.dict(os.environ, process.environment, clear=True):
        return PARSERS[process.module](list(process.arguments))


def processes(objects: list[Object], root: Path) -> Iterator[Process]:
    """Of each container that starts a module of ours.

    Raises KeyError for a secret, or a key of one, that nobody makes.
    """
    secrets = SECRETS | _rendered(objects) | _of_certificates(objects, root)
    for _, spec in pod_specs(objects):
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        for container in spec["containers"]:
            if container.get("command", [])[:2] == ["python", "-m"]:
                yield _process(container, volumes, secrets, root)


def _process(
    container: Object, volumes: Mapping[str, Object], secrets: Mapping[str, Mapping[str, bytes]], root: Path
) -> Process:
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    # A folder for each set of volumes, so that equal containers have equal paths.
    below = root / hashlib.sha256(json.dumps(mounts, sort_keys=True).encode()).hexdigest()[:12]
    for path, volume in mounts.items():
        _mount(volume, secrets, below / path.removeprefix("/"))
    environment = image_environment(container["image"])
    for variable in container["env"]:
        environment[variable["name"]] = _expanded(_value(variable, secrets), environment)

    def placed(text: str) -> str:
        """With the paths of volumes where they lie here."""
        for path, volume in mounts.items():
            if path not in _HERE and (text == path or text.startswith(f"{path}/")):
                found = below / text.removeprefix("/")
                if "persistentVolumeClaim" in volume:
                    # What a claim holds is the operator's matter.
                    found.mkdir(parents=True, exist_ok=True)
                return str(found)
        return text

    arguments = [placed(_expanded(word, environment)) for word in container.get("args", ())]
    environment = {name: placed(value) for name, value in environment.items()}
    return Process(
        container["name"], container["image"], container["command"][2], tuple(arguments), environment, str(below)
    )


def _value(variable: Object, secrets: Mapping[str, Mapping[str, bytes]]) -> str:
    if "valueFrom" not in variable:
        return str(variable["value"])
    if "fieldRef" in variable["valueFrom"]:
        assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        return POD_IP
    reference = variable["valueFrom"]["secretKeyRef"]
    return secrets[reference["name"]][reference["key"]].decode()


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    """As a kubelet does it: a reference to what is not there, or comes later, stays as it is."""
    return re.sub(r"\$\(([A-Za-z_]\w*)\)", lambda found: environment.get(found[1], found[0]), text)


def _mount(volume: Object, secrets: Mapping[str, Mapping[str, bytes]], at: Path) -> None:
    at.mkdir(parents=True, exist_ok=True)
    if "secret" in volume:
        files = secrets[volume["secret"]["secretName"]]
        chosen = volume["secret"].get("items") or [{"key": key, "path": key} for key in files]
        for item in chosen:
            (at / item["path"]).write_bytes(files[item["key"]])


def _rendered(objects: list[Object]) -> dict[str, dict[str, bytes]]:
    return {
        found["metadata"]["name"]: {key: base64.b64decode(value) for key, value in found["data"].items()}
        for found in of_kind(objects, "Secret")
    }


def _of_certificates(objects: list[Object], root: Path) -> dict[str, dict[str, bytes]]:
    """An operator's own, and what cert-manager makes of Certificates."""
    asked = [one["spec"] for one in of_kind(objects, "Certificate")]
    wanted = {spec["secretName"]: spec["dnsNames"] for spec in asked if not spec.get("isCA")}
    issuing = Cluster(root / "issued")
    directories = {name: issuing.issue(name, *names).directory for name, names in (_TLS_SECRETS | wanted).items()}
    return {
        name: {path.name: path.read_bytes() for path in directory.iterdir()} for name, directory in directories.items()
    }


def image_environment(image: str) -> dict[str, str]:
    """What the stage of the Dockerfile sets that this image is made of."""
    role = image.rpartition("/outrider-")[2].partition("@")[0].partition(":")[0]
    stages: dict[str, dict[str, str]] = {}
    own: dict[str, str] = {}
    for line in (DEPLOY / "images" / "Dockerfile").read_text().splitlines():
        if stage := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            own = stages[stage[2]] = dict(stages.get(stage[1], {}))
        elif line.startswith("ENV "):
            own |= dict(pair.split("=", 1) for pair in line.removeprefix("ENV ").split())
    return stages[role] | {"PATH": os.environ["PATH"]}
