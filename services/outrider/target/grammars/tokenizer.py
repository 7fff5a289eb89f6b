"""The data with which a gateway turns text into this model's tokens and back. Read once.

Knows checkpoints; not requests. A gateway has neither transformers nor the files.
"""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from outrider.checkpoint_files import end_tokens, sampling_defaults
from outrider.engine.checkpoints.tokenizer import load_tokenizer
from outrider.rpc.v1 import tokenizer_pb2

log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def read_tokenizer(checkpoint: Path) -> bytes:
    """A serialised Tokenizer; empty, with the reason logged, if the checkpoint has none that a gateway could use."""
    try:
        found = describe(load_tokenizer(checkpoint), end_tokens(checkpoint))
        found.sampling_defaults = json.dumps(sampling_defaults(checkpoint), sort_keys=True)
        return found.SerializeToString(deterministic=True)
    except Exception as error:  # transformers fails in many ways; token ids are served without a tokenizer
        log.warning("no text is served, only tokens: %s", error)
        return b""


def describe(tokenizer: Any, eos_token_ids: tuple[int, ...] = ()) -> tokenizer_pb2.Tokenizer:
    """A transformers tokenizer as a message. `eos_token_ids`: the model's, in addition to the tokenizer's."""
    backend = tokenizer.backend_tokenizer
    # Not transformers' id, which is that of the unknown token if the vocabulary does not have the end token.
    own = backend.token_to_id(tokenizer.eos_token) if tokenizer.eos_token is not None else None
    template = tokenizer.chat_template or {}
    return tokenizer_pb2.Tokenizer(
        json=backend.to_str().encode(),
        chat_templates={"default": template} if isinstance(template, str) else template,
        template_variables=json.dumps(tokenizer.special_tokens_map, default=str, sort_keys=True),
        eos_token_ids=sorted({*eos_token_ids, *([] if own is None else [own])}),
    )
