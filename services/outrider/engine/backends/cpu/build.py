"""Compiles the kernels with the system's C compiler, once for each version and variant, and loads them.

The wheel stays pure Python: kernels are compiled on the machine that runs them. An image compiles them when it is
built, with `python -m outrider.engine.backends.cpu DIRECTORY`, and names that directory in OUTRIDER_KERNELS. A machine
with neither runs on transformers alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from outrider.engine.backends.cpu.variants import VARIANTS, Variant
from outrider.user_cache import cache_directory, check_private, private_directory

SOURCES = Path(__file__).with_name("llama")
FLAGS = ("-std=c11", "-O3", "-shared", "-fPIC", "-pthread")
_TIMEOUT_S = 120


class KernelsMissing(Exception):
    """No kernels are available, or not the configured variant. The message gives the reason."""


class Layout(ctypes.Structure):
    """A variant's layout of weights and type of activations: see llama/model.h."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("panel", "eight_group", "code_group"),
            *("act_bytes", "wide_bytes", "code_bytes", "block_bytes"),
        )
    ]

    panel: int
    eight_group: int
    code_group: int
    act_bytes: int
    wide_bytes: int
    code_bytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Kernels:
    variant: str
    library: ctypes.CDLL
    layout: Layout


def load_kernels(variant: str = "auto") -> Kernels:
    """The kernels of this variant, or the fastest that this CPU can run. Raises KernelsMissing."""
    found = _load(variant)
    if isinstance(found, KernelsMissing):
        raise found
    return found


def start_helpers(count: int, variant: str = "auto") -> None:
    """Ensures that there are `count` helper threads besides a step's own; new ones stay on the calling thread's cores.

    A step of N threads uses the first helpers. Without this call the first step that needs helpers starts them. Does
    nothing if there are no kernels.
    """
    found = _load(variant)
    if isinstance(found, Kernels):
        found.library.outrider_start_helpers(count)


@cache
def _load(name: str) -> Kernels | KernelsMissing:
    """Failures are cached too, so that the compiler is not run twice."""
    reasons = []
    for variant in VARIANTS:
        if name == "auto" and variant.missing:
            continue
        if name in ("auto", variant.name):
            try:
                return _load_variant(variant)
            except (OSError, subprocess.SubprocessError, KernelsMissing) as error:
                reasons.append(str(error))
    # The error of the fastest variant that this CPU can run explains most.
    return KernelsMissing(reasons[0])


def _load_variant(variant: Variant) -> Kernels:
    if variant.missing:
        raise KernelsMissing(f"{variant.name} cannot run on this CPU: it lacks {', '.join(variant.missing)}")
    library = ctypes.CDLL(str(_compiled(variant)))
    if not library.outrider_granted():
        raise KernelsMissing(f"{variant.name} cannot run here: the system does not grant it to this process")
    for name in ("outrider_forward", "outrider_project", "outrider_move", "outrider_start_helpers"):
        getattr(library, name).restype = None
    library.outrider_start_helpers.argtypes = [ctypes.c_int64]
    library.outrider_layout.restype = Layout
    return Kernels(variant.name, library, library.outrider_layout())


def compile_variants(directory: Path) -> list[Path]:
    """Compiles every variant of this architecture, for OUTRIDER_KERNELS. Raises OSError and
    subprocess.SubprocessError."""
    directory.mkdir(parents=True, exist_ok=True)
    compiler, made = _compiler(), []
    for variant in VARIANTS:
        if variant.compiles_here:
            made.append(_library(directory, variant, ""))
            _compile(compiler, variant, made[-1], 0o755)
    return made


def _compiled(variant: Variant) -> Path:
    """The library in OUTRIDER_KERNELS or in the user's cache, where it is compiled if it is missing."""
    if shipped := os.environ.get("OUTRIDER_KERNELS"):
        path = _library(Path(shipped), variant, "")
        if path.exists():
            check_private(path, stat.S_ISREG, owners=(0, os.geteuid()))
            return path
    compiler = _compiler()
    directory = private_directory(cache_directory() / "native")
    directory.chmod(0o700)
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=True).stdout
    path = _library(directory, variant, f"{compiler} {version.decode(errors='replace')}")
    # Processes that start together compile it once.
    with (directory / f"{variant.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(compiler, variant, path, 0o700)
    check_private(path, stat.S_ISREG)
    return path


def _library(directory: Path, variant: Variant, compiler: str) -> Path:
    """Its name has a hash of all inputs: the sources, the options, and the compiler if that may change."""
    digest = hashlib.sha256(" ".join([compiler, *FLAGS, *variant.flags]).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return directory / f"llama-{variant.name}-{digest.hexdigest()[:16]}.so"


def _compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise FileNotFoundError("no C compiler: set CC, or install gcc")


def _compile(compiler: str, variant: Variant, path: Path, mode: int) -> None:
    """All or nothing: the process may end in the middle."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        output = Path(scratch) / path.name
        run_compiler([compiler, *FLAGS, *variant.flags, str(SOURCES / "step.c"), "-o", str(output), "-lm"])
        output.chmod(mode)
        os.replace(output, path)


def run_compiler(command: Sequence[str]) -> None:
    """Raises OSError with the compiler's output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise OSError(f"{command[0]} cannot compile the kernels: {done.stderr.strip()[:500]}")
