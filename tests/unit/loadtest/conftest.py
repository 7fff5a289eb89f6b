"""The peers' scripts are no package: each runs in an environment of its own, from its own directory."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "loadtest/peers"))
