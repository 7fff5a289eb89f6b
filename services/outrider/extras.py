"""What to install where a package is missing: one line in place of a traceback."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires

# Import name → distribution, where they differ by more than "_" and "-".
_DISTRIBUTIONS = {
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "opentelemetry": "opentelemetry-sdk",
    "pynvml": "nvidia-ml-py",
    "yaml": "pyyaml",
}
_REQUIREMENT = re.compile(r"""([\w.-]+)([^;]*)(?:;.*extra == ["']([\w-]+)["'])?""")


@contextmanager
def naming_extras(program: str, own: str = "") -> Iterator[None]:
    """Ends the program with a line if the block needs a package that is not installed. `own`: the program's extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (line := missing(error.name or "", own)) is None:
            raise
        sys.exit(f"{program}: {line}")


def missing(module: str, own: str = "") -> str | None:
    """What to install for this module; None where it is of none of our requirements."""
    top = module.partition(".")[0]
    wanted = _DISTRIBUTIONS.get(top, top.replace("_", "-").lower())
    found: dict[str, str] = {}
    for distribution, version, extra in _requirements():
        if distribution.lower() == wanted:
            found.setdefault(extra, distribution + version.strip())
    if not found:
        return None
    extra = next(one for one in ("", own, *found) if one in found)
    package = f"outrider[{extra}]" if extra else "outrider"
    return f'the package {top} is missing: pip install "{package}", or "{found[extra]}" alone'


def _requirements() -> Iterator[tuple[str, str, str]]:
    """Distribution, range of versions, and extra (empty for none) of everything that this package may need."""
    try:
        given = requires("outrider") or ()
    except PackageNotFoundError:
        return
    for one in given:
        if parts := _REQUIREMENT.match(one):
            yield parts[1], parts[2], parts[3] or ""
