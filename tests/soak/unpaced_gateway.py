"""python -m tests.soak.unpaced_gateway: a gateway that refuses as fast as it can: a soak sends from one address."""

from __future__ import annotations

import sys

from outrider.gateway.__main__ import main
from outrider.gateway.tenants import admission

if __name__ == "__main__":
    admission._REFUSALS = float("inf")
    sys.exit(main())
