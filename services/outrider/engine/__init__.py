"""The engine that target and draft share: paged KV cache, ragged batches, rewind.

Knows one model and its sequences; not the network, not verification, not whether tokens are drafted or committed.

Begin with `engine`; `models/` loads what it runs, `run/` is one forward.
"""

import outrider.engine._quiet  # noqa: F401
from outrider.engine.checkpoints.checkpoints import CheckpointError, weights_revision
from outrider.engine.checkpoints.fetching import resolve
from outrider.engine.checkpoints.tokenizer import tokenizer_fingerprint
from outrider.engine.engine import DeviceLost, Engine, ModelInfo, revision
from outrider.engine.kv.step import EngineSequence, OutOfBlocks, Row
from outrider.engine.kv.tree import MAX_TREE_NODES
from outrider.engine.models.taps import HEAD_INPUT
from outrider.engine_config import EngineConfig

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
