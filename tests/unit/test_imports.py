"""Which module may import which: no circles, and every package has its layer. `make lint` holds the layers."""

from __future__ import annotations

import graphlib
import pkgutil
import tomllib
from collections.abc import Mapping, Set
from pathlib import Path

import grimp
import outrider
import outrider_controller
import pytest

GENERATED = "outrider.rpc.v1"


def circle(imports: Mapping[str, Set[str]]) -> list[str]:
    """Modules that import each other in a loop; empty if none do."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("outrider", "outrider_controller")
    modules = {module for module in graph.modules if not module.startswith(GENERATED)}
    assert len(modules) > 150
    assert circle({module: graph.find_modules_directly_imported_by(module) & modules for module in modules}) == []


@pytest.mark.parametrize("closing", ["a", "b"])
def test_a_circle_would_be_found(closing: str) -> None:
    assert closing in circle({"a": {"b"}, "b": {"c"}, "c": {closing}})


def test_every_package_has_its_place_among_the_layers() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    placed = {name.strip(" ()") for layer in layers for name in layer.split("|")}
    found = {
        f"{package.__name__}.{module.name}"
        for package in (outrider, outrider_controller)
        for module in pkgutil.iter_modules(package.__path__)
    }
    assert found - placed == set()
