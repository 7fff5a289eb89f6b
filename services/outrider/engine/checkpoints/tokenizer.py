"""Reads the tokenizer of a checkpoint: its own tokenizer.json, token for token.

For many classes transformers' AutoTokenizer builds a new tokenizer of the vocabulary and drops steps that the file
has. So only chat templates and the names of special tokens come from transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.engine.checkpoints.checkpoints import CheckpointError


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
