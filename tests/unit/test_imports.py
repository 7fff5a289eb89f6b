"""No module of the product imports itself, by whatever way round."""

from __future__ import annotations

import graphlib
from collections.abc import Mapping, Set

import grimp
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
