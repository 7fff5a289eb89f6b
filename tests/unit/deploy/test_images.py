"""The Dockerfile: a target for each role, with what that role needs. It is read here, not built."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.unit.deploy.chart import DEPLOY, containers, pod_specs, rendered

ROOT = DEPLOY.parent
FILE = DEPLOY / "images/Dockerfile"
ROLES = {"target", "draft", "gateway", "controller"}


def stages() -> dict[str, str]:
    """The text of each stage, with that of the stages that it builds on before its own."""
    found: dict[str, str] = {}
    for text in re.split(r"^(?=FROM )", FILE.read_text(), flags=re.MULTILINE)[1:]:
        base, name = re.findall(r"FROM (\S+) AS (\w+)", text)[0]
        found[name] = found.get(base, "") + text
    return found


def test_hadolint_finds_nothing() -> None:
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([linter, FILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_each_role_of_the_chart_has_a_target_that_starts_the_same_process_as_the_same_user() -> None:
    started = {one["name"]: one["command"] for one in containers(rendered({})) if one["name"] in ROLES}
    assert started.keys() == ROLES <= stages().keys()
    users = {spec["securityContext"]["runAsUser"] for _, spec in pod_specs(rendered({}))}
    for role, command in started.items():
        entry = ", ".join(f'"{word}"' for word in command)
        assert f"ENTRYPOINT [{entry}]" in stages()[role]
        assert re.findall(r"^USER (\d+):", stages()[role], re.MULTILINE) == [str(user) for user in users]
        assert "HEALTHCHECK" in stages()[role]


def test_ports_that_images_expose_are_those_of_the_pods() -> None:
    for container in containers(rendered({})):
        if container["name"] in ROLES:
            ports = {str(port["containerPort"]) for port in container["ports"]}
            assert set(re.findall(r"^EXPOSE (.+)$", stages()[container["name"]], re.MULTILINE)[0].split()) == ports


def test_images_install_extras_that_there_are_and_copy_files_that_there_are() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"whl\)\[([^\]$]+)", FILE.read_text()):
        assert set(names.split(",")) <= extras.keys()
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", FILE.read_text(), re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
        # Docker sees only what is not ignored.
        ignored = (ROOT / ".dockerignore").read_text().split()
        assert all(f"!{source}" in ignored for source in sources.split())
