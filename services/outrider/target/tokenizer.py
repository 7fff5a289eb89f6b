"""The data with which a gateway turns text into this model's tokens and back. Read once, with transformers.

Knows checkpoints; not requests. A gateway has neither transformers nor the files.
"""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from outrider.engine import checkpoints
from outrider.rpc.v1 import tokenizer_pb2

log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def read_tokenizer(checkpoint: Path) -> bytes:
    """A serialised Tokenizer; empty, with the reason logged, if the checkpoint has none that a gateway could use."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(checkpoint), trust_remote_code=False, local_files_only=True)
        return describe(tokenizer, checkpoints.eos_token_ids(checkpoint)).SerializeToString(deterministic=True)
    except Exception as error:  # transformers fails in many ways; token ids are served without a tokenizer
        log.warning("no text is served, only tokens: %s", error)
        return b""


def describe(tokenizer: Any, eos_token_ids: tuple[int, ...] = ()) -> tokenizer_pb2.Tokenizer:
    """A transformers tokenizer as a message. `eos_token_ids`: the model's, in addition to the tokenizer's. Raises
    ValueError."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("tokenizer.json: missing; only fast tokenizers are served")
    # A checkpoint may ship with truncation switched on, which would shorten prompts silently.
    backend.no_truncation()
    backend.no_padding()
    ends = {*eos_token_ids, *([] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)])}
    template = tokenizer.chat_template or {}
    return tokenizer_pb2.Tokenizer(
        json=backend.to_str().encode(),
        chat_templates={"default": template} if isinstance(template, str) else template,
        template_variables=json.dumps(tokenizer.special_tokens_map, default=str, sort_keys=True),
        eos_token_ids=sorted(ends),
    )
