"""The product imports none of its proof: no fakes, no benchmarks, no tests. import-linter does not see the last two."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"services/outrider": "outrider", "controller/outrider_controller": "outrider_controller"}
PROOF = ("outrider.testing", "benchmarks", "tests")


def imported(source: str) -> Iterator[str]:
    """What a module imports or names as a module to run, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def is_proof(name: str) -> bool:
    return any(name == proof or name.startswith(f"{proof}.") for proof in PROOF)


@pytest.mark.parametrize("directory", PACKAGES)
def test_the_product_neither_imports_nor_starts_its_proof(directory: str) -> None:
    modules = [path for path in (ROOT / directory).rglob("*.py") if (ROOT / directory / "testing") not in path.parents]
    assert len(modules) > 50
    found = {
        f"{path.relative_to(ROOT)}: {name}" for path in modules for name in imported(path.read_text()) if is_proof(name)
    }
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import benchmarks.arms",
        "def f():\n    from outrider.testing.tiny import tiny_checkpoint",
        "from outrider import testing",
        "argv = ('python', '-m', 'tests.simulation')",
    ],
)
def test_an_import_of_proof_would_be_found(source: str) -> None:
    assert any(map(is_proof, imported(source)))
