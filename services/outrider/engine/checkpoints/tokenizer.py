"""Reads the tokenizer of a checkpoint: its own tokenizer.json, token for token.

For many classes transformers' AutoTokenizer builds a new tokenizer of the vocabulary and drops steps that the file
has. So only chat templates and the names of special tokens come from transformers.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from outrider.checkpoint_files import read_json
from outrider.engine.checkpoints.checkpoints import CheckpointError, read_config
from outrider.engine.checkpoints.fetching import resolve


def load_tokenizer(path: Path | str) -> Any:
    """A transformers tokenizer that encodes and decodes with tokenizer.json alone. Raises CheckpointError."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(str(file), "missing")
    try:
        exact = Tokenizer.from_file(str(file))
        found: Any = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # both libraries fail in many ways on a damaged file
        raise CheckpointError(str(file), f"unreadable: {error}") from error
    # A checkpoint may ship with truncation switched on, which would shorten prompts silently.
    exact.no_truncation()
    exact.no_padding()
    # transformers may have added tokens to the file's own, or changed their flags.
    found._tokenizer = exact
    return found


_PADDING = re.compile(r"[\[<]\|?_?(pad|dummy|unused|placeholder)[_-]?\d+\|?[\]>]", re.IGNORECASE)
"""Tokens that only make a vocabulary longer."""


def tokenizer_fingerprint(path: Path) -> str:
    """A hash of the real tokens with their ids: equal when token ids mean the same.

    How merges are written, and whether a token is in the vocabulary or added to it, makes no difference. A distilled
    draft has its target's tokenizer.
    """
    tokens = sorted((i, token) for token, i in _tokens(tokenizer_of(path)).items() if not _PADDING.fullmatch(token))
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def num_tokens(path: Path) -> int:
    """One more than the highest id of a token: the rows of a model's head beyond are padding."""
    return max(_tokens(tokenizer_of(path)).values(), default=-1) + 1


def tokenizer_of(path: Path) -> Path:
    """The checkpoint that has the tokenizer."""
    if (draft := read_config(path).get("outrider_draft")) is None:
        return path
    return resolve(draft["base"])


def _tokens(path: Path) -> dict[str, int]:
    try:
        spec = read_json(path / "tokenizer.json")
        vocab = spec["model"]["vocab"]
        # Of a Unigram model: pairs of a piece and its score.
        listed = vocab if isinstance(vocab, dict) else {piece: i for i, (piece, _) in enumerate(vocab)}
        return {**listed, **{token["content"]: token["id"] for token in spec.get("added_tokens", [])}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}/tokenizer.json", f"unreadable: {error}") from error
