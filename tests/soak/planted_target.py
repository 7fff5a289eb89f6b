"""python -m tests.soak.planted_target FAULT ARGUMENTS...: a target with a fault that the simulation finds."""

from __future__ import annotations

import sys

from outrider.target.__main__ import main

from tests.simulation.planted import Planted, planted

if __name__ == "__main__":
    with planted(Planted[sys.argv.pop(1)]):
        sys.exit(main())
