"""next_release.py WHEEL DIRECTORY: a wheel of vLLM for GPUs as vLLM for CPUs, for PYTHONPATH.

Its Python files, with links to the compiled parts of the vLLM that this interpreter has.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import zipfile
from pathlib import Path


def main(wheel: Path, directory: Path) -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    installed = Path(spec.origin).parent
    shutil.rmtree(directory, ignore_errors=True)
    with zipfile.ZipFile(wheel) as files:
        files.extractall(directory, [name for name in files.namelist() if not name.endswith(".so")])
    for compiled in installed.glob("*.so"):
        (directory / "vllm" / compiled.name).symlink_to(compiled)
    [metadata] = directory.glob("*.dist-info/METADATA")
    release = next(line for line in metadata.read_text().splitlines() if line.startswith("Version: "))
    # By its version vLLM knows for what it was built.
    metadata.write_text(metadata.read_text().replace(release, f"{release}+cpu", 1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
