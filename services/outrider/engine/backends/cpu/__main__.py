"""python -m outrider.engine.backends.cpu DIRECTORY: compiles the kernels ahead, as an image does (OUTRIDER_KERNELS)."""

from __future__ import annotations

import sys
from pathlib import Path

from outrider.engine.backends.cpu.build import compile_variants

if len(sys.argv) != 2:
    sys.exit(__doc__)
for path in compile_variants(Path(sys.argv[1])):
    print(path)
