"""Compiles the kernels with the system's C compiler, once for each version and variant of them, and loads them.

A wheel stays pure Python: kernels are compiled where they run. An image compiles them as it is built, with
`python -m outrider.engine.backends.cpu DIRECTORY`, and names that directory in OUTRIDER_KERNELS. A machine with neither
runs on transformers alone.
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
    """There are no kernels to be had, or not of the variant that was asked for. Says why."""


class Layout(ctypes.Structure):
    """How a variant wants weights to lie, and what it keeps activations in: see llama/model.h."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("panel", "eight_group", "code_group", "act_bytes", "wide_bytes", "code_bytes")
    ]

    panel: int
    eight_group: int
    code_group: int
    act_bytes: int
    wide_bytes: int
    code_bytes: int


@dataclass(frozen=True, slots=True)
class Kernels:
    """One variant, loaded."""

    variant: str
    library: ctypes.CDLL
    layout: Layout


def load_kernels(variant: str = "auto") -> Kernels:
    """The kernels of that variant, or the quickest that this CPU can run. Raises KernelsMissing."""
    found = _load(variant)
    if isinstance(found, KernelsMissing):
        raise found
    return found


def start_helpers(count: int, variant: str = "auto") -> None:
    """Sees to it that there are so many besides a step's own thread; new ones keep to the cores of the calling thread.

    A step of so many threads has the first ones. Without this call they are started by the first step that wants them.
    Nothing happens where there are no kernels.
    """
    found = _load(variant)
    if isinstance(found, Kernels):
        found.library.outrider_start_helpers(count)


@cache
def _load(name: str) -> Kernels | KernelsMissing:
    """Failures are remembered too: a compiler is not asked twice."""
    reasons = []
    for variant in VARIANTS:
        if name == "auto" and variant.missing:
            continue
        if name in ("auto", variant.name):
            try:
                return _load_variant(variant)
            except (OSError, subprocess.SubprocessError, KernelsMissing) as error:
                reasons.append(str(error))
    # Of those that would run here the quickest says best what is wrong.
    return KernelsMissing(reasons[0])


def _load_variant(variant: Variant) -> Kernels:
    if variant.missing:
        raise KernelsMissing(f"{variant.name} cannot run on this CPU: it lacks {', '.join(variant.missing)}")
    library = ctypes.CDLL(str(_compiled(variant)))
    if not library.outrider_granted():
        raise KernelsMissing(f"{variant.name} cannot run here: the system does not grant it to this process")
    library.outrider_forward.restype = library.outrider_start_helpers.restype = None
    library.outrider_start_helpers.argtypes = [ctypes.c_int64]
    library.outrider_layout.restype = Layout
    return Kernels(variant.name, library, library.outrider_layout())


def compile_variants(directory: Path) -> list[Path]:
    """Every variant of this kind of machine, for OUTRIDER_KERNELS. Raises OSError and subprocess.SubprocessError."""
    directory.mkdir(parents=True, exist_ok=True)
    compiler, made = _compiler(), []
    for variant in VARIANTS:
        if variant.compiles_here:
            made.append(_library(directory, variant, ""))
            _compile(compiler, variant, made[-1], 0o755)
    return made


def _compiled(variant: Variant) -> Path:
    """From OUTRIDER_KERNELS, or from the user's cache, into which it is compiled first."""
    if shipped := os.environ.get("OUTRIDER_KERNELS"):
        path = _library(Path(shipped), variant, "")
        if path.exists():
            check_private(path, stat.S_ISREG, owners=(0, os.geteuid()))
            return path
    compiler = _compiler()
    directory = private_directory(cache_directory() / "native")
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=True).stdout
    path = _library(directory, variant, f"{compiler} {version.decode(errors='replace')}")
    # Processes that start together need it compiled once.
    with (directory / f"{variant.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(compiler, variant, path, 0o700)
    check_private(path, stat.S_ISREG)
    return path


def _library(directory: Path, variant: Variant, compiler: str) -> Path:
    """Named by all that it is made from: the sources, the options, and the compiler where that may change."""
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
    """All or nothing: a process may end in the middle."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        output = Path(scratch) / path.name
        run_compiler([compiler, *FLAGS, *variant.flags, str(SOURCES / "step.c"), "-o", str(output), "-lm"])
        output.chmod(mode)
        os.replace(output, path)


def run_compiler(command: Sequence[str]) -> None:
    """Raises OSError with what the compiler said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise OSError(f"{command[0]} cannot compile the kernels: {done.stderr.strip()[:500]}")
