"""The wheel, as it is built: the product, and none of its proof."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROOF = re.compile(r"fakes|bench|simulation|planted|delay_proxy|changed_draft|paced|^tests/")
TESTING = 100


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    directory = tmp_path_factory.mktemp("wheel")
    command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory))
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    [path] = directory.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_product_and_no_proof(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert "outrider/target/step/worker.py" in names and "outrider_controller/cli/app.py" in names
    assert not [name for name in names if PROOF.search(name)]


def test_what_the_wheel_offers_for_tests_is_small(wheel: zipfile.ZipFile) -> None:
    modules = [name for name in wheel.namelist() if name.startswith("outrider/testing/")]
    assert modules
    assert sum(wheel.read(name).count(b"\n") for name in modules) <= TESTING
