"""A Llama as a GGUF file in bfloat16, as llama.cpp reads it: `python loadtest/peers/gguf_export.py MODEL DIRECTORY`.

The weights are the checkpoint's, bit by bit. There is no tokenizer in it: peers are asked in token ids.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gguf import GGMLQuantizationType
from outrider.engine import resolve
from outrider.testing.llama_gguf import write_gguf


def export(checkpoint: Path, directory: Path) -> Path:
    """Writes the file, complete or not at all. One that is newer than the checkpoint is used again."""
    file = directory / f"{checkpoint.name}-bf16.gguf"
    if file.exists() and file.stat().st_mtime > (checkpoint / "config.json").stat().st_mtime:
        return file
    directory.mkdir(parents=True, exist_ok=True)
    scratch = write_gguf(checkpoint, file.with_suffix(".part"), GGMLQuantizationType.BF16, tokenizer=False)
    return scratch.rename(file)


if __name__ == "__main__":
    print(export(resolve(sys.argv[1]), Path(sys.argv[2])))
