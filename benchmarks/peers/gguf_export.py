"""Exports a Llama as a GGUF file for llama.cpp: `python -m benchmarks.peers.gguf_export MODEL BF16 DIRECTORY`.

In BF16 the weights are bit for bit the checkpoint's. Its readers get prompts as token ids.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gguf import GGMLQuantizationType
from outrider.engine import resolve

from benchmarks.support.llama_gguf import write_gguf


def export(checkpoint: Path, kind: str, directory: Path) -> Path:
    """Writes the file atomically, with matrices of this kind. One newer than the checkpoint is kept."""
    file = directory / f"{checkpoint.name}-{kind}.gguf"
    if file.exists() and file.stat().st_mtime > (checkpoint / "config.json").stat().st_mtime:
        return file
    directory.mkdir(parents=True, exist_ok=True)
    scratch = write_gguf(checkpoint, file.with_suffix(".part"), GGMLQuantizationType[kind])
    return scratch.rename(file)


if __name__ == "__main__":
    print(export(resolve(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
