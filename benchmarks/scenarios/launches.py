"""python -m benchmarks launches"""

from __future__ import annotations

import os
from pathlib import Path

import click
from outrider_controller.cli.output import json_file_option

from benchmarks.report import finish, show, table

_FIRST = {"decode": 138, "5 positions": 138, "5, sampled": 206, "5, sampled, penalties": 230, "head, 4 tokens": 200}
"""The others of 8B at commit e317b3e0, the first that counted. The head then copied 16 times, and 4 back."""


@click.command("launches")
@json_file_option
def launches(json_file: Path | None) -> int:
    """How many kernels does a step launch on a GPU, and how often does it copy?

    Counted without one: the engine's own code runs on a CPU, and every operation of torch that is no view counts as one
    launch, which is the least that it can be.
    """
    # Kernels are either interpreted or compiled, as this says when they are imported.
    os.environ["TRITON_INTERPRET"] = "1"
    from benchmarks.support.launches import SHAPES, counts_of

    rows = [
        {
            "shape": shape,
            "step": name,
            "products": counts.products,
            "attention": counts.attention,
            "others": counts.others,
            "others at first": _FIRST.get(name, "") if shape == "8b" else "",
            "copies to the device": counts["to device"],
            "to the host": counts["to host"],
        }
        for shape in SHAPES
        for name, counts in counts_of(shape).items()
    ]
    show(table(rows), "Launches of a step of 4 sequences, and of a proposal of a head of one layer for as many.")
    return finish("launches", {"rows": rows}, json_file)
