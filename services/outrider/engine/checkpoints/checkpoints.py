"""Reads the metadata of checkpoints, and refuses all but plain weights.

A checkpoint is a directory with config.json, tokenizer.json and *.safetensors. Pickled weights can execute code when
they are read, so they are always refused.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from outrider.checkpoint_files import fault, read_json, weight_files
from outrider.engine.checkpoints.digests import file_digest


class CheckpointError(Exception):
    """A checkpoint that cannot be served. Names the file or field at fault."""

    def __init__(self, file: str, message: str) -> None:
        # In one line, whatever the library said that found it.
        super().__init__(f"{file}: {' '.join(message.split())}")
        self.file = file


def check(path: Path) -> Path:
    """Refuses a directory without plain weights, or with another fault of its files; returns it otherwise."""
    if (found := fault(path)) is not None:
        raise CheckpointError(found.file, found.message)
    for file in weight_files(path):
        _check_safetensors(file)
    return path


def read_config(path: Path) -> dict[str, Any]:
    try:
        return read_json(path / "config.json")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}/config.json", str(error)) from error


def weights_revision(path: Path, quantization: str = "none", *, every: bool = False) -> str:
    """A hash of config and weights, and of the quantization if there is one, as that makes another model.

    every: also of files that are none of the model's, as a head's may be."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")) if every else weight_files(path):
        digest.update(file_digest(file))
    found = digest.hexdigest()[:16]
    return found if quantization == "none" else f"{found}-{quantization}"


def _check_safetensors(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        # Of a file that may not be read safetensors says that it is not there.
        with file.open("rb"), safe_open(file, framework="np") as tensors:
            tensors.keys()
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(str(file), f"not a sound safetensors file: {error}") from error
