"""The engine that target and draft share: paged KV cache, ragged batches, rewind.

Knows one model and its sequences; not the network, not verification, not whether tokens are drafted or committed.
"""

import outrider.engine._quiet  # noqa: F401
from outrider.engine.checkpoints import CheckpointError, weights_revision
from outrider.engine.config import EngineConfig
from outrider.engine.engine import DeviceLost, Engine, ModelInfo
from outrider.engine.fetching import resolve
from outrider.engine.revision import revision
from outrider.engine.sequence import EngineSequence, OutOfBlocks
from outrider.engine.step import Row
from outrider.engine.taps import HEAD_INPUT
from outrider.engine.tree import MAX_TREE_NODES
from outrider.engine.vocabulary import tokenizer_fingerprint

__all__ = [
    "HEAD_INPUT",
    "MAX_TREE_NODES",
    "CheckpointError",
    "DeviceLost",
    "Engine",
    "EngineConfig",
    "EngineSequence",
    "ModelInfo",
    "OutOfBlocks",
    "Row",
    "resolve",
    "revision",
    "tokenizer_fingerprint",
    "weights_revision",
]
