"""Compiles llama.c once for each version of it, with the system's C compiler, and loads it.

Not at build time: a wheel stays pure Python, and a machine without a compiler or with an older CPU runs on torch alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from outrider.engine.checkpoints import cache_directory

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("llama.c")
_FLAGS = [
    "-std=c11",
    "-O3",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mavx512bf16",
    "-mavx512vnni",
    "-mamx-tile",
    "-mamx-bf16",
    "-mfma",
    "-shared",
    "-fPIC",
    "-pthread",
]
_TIMEOUT_S = 120


@cache
def load_library() -> ctypes.CDLL | None:
    """The kernels, or None, with the reason in the log, where they cannot be had."""
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("no native kernels, torch's are used instead: %s", error)
        return None
    if not library.outrider_supported():
        logger.info("no native kernels, torch's are used instead: the CPU has no AVX512-BF16 and VNNI")
        return None
    library.outrider_forward.restype = library.outrider_start_helpers.restype = None
    library.outrider_start_helpers.argtypes = [ctypes.c_int64]
    library.outrider_use_tiles(True)
    return library


def start_helpers(count: int) -> None:
    """Sees to it that there are so many besides a step's own thread; new ones keep to the cores of the calling thread.

    A step of so many threads has the first ones. Without this call they are started by the first step that wants them.
    Nothing happens where there are no native kernels.
    """
    if library := load_library():
        library.outrider_start_helpers(count)


def _compiled() -> Path:
    compiler = _compiler()
    key = hashlib.sha256(_SOURCE.read_bytes() + " ".join([compiler, *_FLAGS]).encode()).hexdigest()[:16]
    path = cache_directory() / "native" / f"llama-{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _compile(compiler, path)
    return path


def _compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return name
    raise FileNotFoundError("no C compiler: set CC, or install gcc")


def _compile(compiler: str, path: Path) -> None:
    """Several processes may do it at the same time: each writes a file of its own, and the last rename stays."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        output = Path(scratch) / path.name
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(output), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise OSError(f"{compiler} cannot compile {_SOURCE.name}: {done.stderr.strip()[:500]}")
        os.replace(output, path)
