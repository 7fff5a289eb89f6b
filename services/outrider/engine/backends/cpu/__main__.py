"""Compiles the kernels ahead, as an image does, for OUTRIDER_KERNELS."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.engine.backends.cpu.build import compile_variants

parser = argparse.ArgumentParser(prog="python -m outrider.engine.backends.cpu", description=__doc__)
parser.add_argument("directory", type=Path, help="is made if there is none")
for path in compile_variants(parser.parse_args().directory):
    print(path)
