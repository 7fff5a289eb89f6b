"""Reads the metadata of checkpoints, and refuses all but plain weights.

A checkpoint is a directory with config.json, tokenizer.json and *.safetensors. Pickled weights can execute code when
they are read, so they are always refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from outrider.checkpoint_files import fault
from outrider.engine.digests import file_digest

_PADDING = re.compile(r"[\[<]\|?_?(pad|dummy|unused|placeholder)[_-]?\d+\|?[\]>]", re.IGNORECASE)
"""Tokens that only make a vocabulary longer."""


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
    for file in sorted(path.glob("*.safetensors")):
        _check_safetensors(file)
    return path


def read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}/config.json", str(error)) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}/config.json", "not a JSON object")
    return config


def tokenizer_fingerprint(path: Path) -> str:
    """A hash of the real tokens with their ids: equal when token ids mean the same.

    How merges are written, and whether a token is in the vocabulary or added to it, makes no difference. A distilled
    draft has its target's tokenizer.
    """
    tokens = sorted((i, token) for token, i in _tokens(_of_tokens(path)).items() if not _PADDING.fullmatch(token))
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def num_tokens(path: Path) -> int:
    """One more than the highest id of a token: the rows of a model's head beyond are padding."""
    return max(_tokens(_of_tokens(path)).values(), default=-1) + 1


def _of_tokens(path: Path) -> Path:
    """The checkpoint that has the tokenizer."""
    if (draft := read_config(path).get("outrider_draft")) is None:
        return path
    from outrider.engine.fetching import resolve

    return resolve(draft["base"])


def _tokens(path: Path) -> dict[str, int]:
    try:
        spec = json.loads((path / "tokenizer.json").read_text())
        vocab = spec["model"]["vocab"]
        # Of a Unigram model: pairs of a piece and its score.
        listed = vocab if isinstance(vocab, dict) else {piece: i for i, (piece, _) in enumerate(vocab)}
        return {**listed, **{token["content"]: token["id"] for token in spec.get("added_tokens", [])}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}/tokenizer.json", f"unreadable: {error}") from error


def weights_revision(path: Path, quantization: str = "none") -> str:
    """A hash of config and weights, and of the quantization if there is one, as that makes another model."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
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
