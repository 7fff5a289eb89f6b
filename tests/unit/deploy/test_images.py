"""The Dockerfile: a target for each role, with what that role needs. It is read here, not built."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from outrider_controller.config import ControllerConfig

from tests.unit.deploy.chart import DEPLOY, containers, pod_specs, rendered
from tests.unit.deploy.processes import PARSERS

ROOT = DEPLOY.parent
FILE = DEPLOY / "images/Dockerfile"
MODULES = {
    "target": "outrider.target",
    "draft": "outrider.draft",
    "gateway": "outrider.gateway",
    "controller": "outrider_controller",
}


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
    started = {one["name"]: one["command"] for one in containers(rendered({})) if one["name"] in MODULES}
    assert started.keys() == MODULES.keys() <= stages().keys()
    users = {spec["securityContext"]["runAsUser"] for _, spec in pod_specs(rendered({}))}
    for role, command in started.items():
        entry = ", ".join(f'"{word}"' for word in command)
        assert f"ENTRYPOINT [{entry}]" in stages()[role]
        assert re.findall(r"^USER (\d+):", stages()[role], re.MULTILINE) == [str(user) for user in users]
        assert "HEALTHCHECK" in stages()[role]


def test_ports_that_images_expose_are_those_of_the_pods() -> None:
    for container in containers(rendered({})):
        if container["name"] in MODULES:
            ports = {str(port["containerPort"]) for port in container["ports"]}
            assert set(re.findall(r"^EXPOSE (.+)$", stages()[container["name"]], re.MULTILINE)[0].split()) == ports


def test_what_asks_an_image_for_its_health_asks_the_port_that_its_process_listens_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for role, module in MODULES.items():
        with monkeypatch.context() as patch:
            for name, value in re.findall(r"(OUTRIDER_\w+)=(\S+)", stages()[role]):
                patch.setenv(name, value)
            needed = ["--model", "m", "--listen", "127.0.0.1:0"] if role in ("target", "draft") else []
            config = PARSERS[module]([*needed, "--metadata", "redis://redis:6379"])
        listen = config.controls()[0].ops_listen if isinstance(config, ControllerConfig) else config.ops_listen
        asked = re.findall(r"HEALTHCHECK .*http://127\.0\.0\.1:(\d+)/livez", stages()[role])
        assert [listen.rpartition(":")[2]] == asked


def test_images_of_workers_have_kernels_for_every_cpu_and_no_compiler_unless_for_gpus() -> None:
    for role in ("target", "draft"):
        text = stages()[role]
        (directory,) = re.findall(r"python -m outrider\.engine\.backends\.cpu (\S+)", text)
        assert f"OUTRIDER_KERNELS={directory} " in text
        assert re.search(
            r'case "\$EXTRA" in \*gpu\*\) ;; \*\) apt-get purge -y --auto-remove gcc libc6-dev ;; esac', text
        )


def test_images_install_extras_that_there_are_and_copy_files_that_there_are() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"whl\)\[([^\]$]+)", FILE.read_text()):
        assert set(names.split(",")) <= extras.keys()
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", FILE.read_text(), re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
        # Docker sees only what is not ignored.
        ignored = (ROOT / ".dockerignore").read_text().split()
        assert all(f"!{source}" in ignored for source in sources.split())


def test_the_page_builds_every_image_that_the_chart_can_name() -> None:
    (built,) = re.findall(r"^for role in (.+); do$", (ROOT / "docs/deploy.md").read_text(), re.MULTILINE)
    schema = json.loads((DEPLOY / "k8s/values.schema.json").read_text())["properties"]["image"]["properties"]
    assert set(built.split()) == set(schema["digests"]["propertyNames"]["enum"]) <= stages().keys()


def test_vllms_image_keeps_what_vllm_has_chosen_and_compiles_into_the_cache() -> None:
    text = stages()["vllm"]
    assert re.search(r"pip list --format=freeze > (\S+) .*?pip install .*--constraint \1 ", text, re.DOTALL)
    for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "OUTRIDER_CACHE"):
        assert re.search(rf"\b{name}=/var/cache/outrider\b", text), name
