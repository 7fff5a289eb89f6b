"""Every bound of a message that depends on no model and no setting, once, whoever sends it and wherever it lands."""

from __future__ import annotations

MAX_MODEL_CHARS = 256
MAX_REVISION_CHARS = 256
MAX_LABEL_CHARS = 128
"""Of a request's id and its tenant."""
MAX_ERROR_NAME_CHARS = 100
"""Of an error's reason or field, which may have come from a peer. Of its message: errors.MAX_MESSAGE_CHARS."""

MAX_SALT_BYTES = 64
MAX_CLIENT_STOP_TOKENS = 64
MAX_STOP_TOKENS = 256
"""Those of a client, and those with which the model ends a text."""

MAX_DRAFT_TOKENS = 64
"""That a client may ask for in one proposal."""
MAX_RUN_AHEAD_TOKENS = 32
"""A draft goes no further beyond its proposal, and a target keeps no more."""
MAX_WAIT_US = 10_000_000
"""A target holds a sequence back for a draft no longer."""
MAX_TREE_TOKENS = 256
"""A draft's longest guess, 64 tokens and 32 beyond them, and five tokens beside it, make 101. One of the version before
also sends 16 paths of four tokens that leave it, and five beside each: 245."""
MAX_DRAFT_BYTES = 64 << 10
"""Of one Draft, with what this version does not know: 96 distributions of 64 tokens make 40,000. It may be handed on,
together with those of other sequences."""
MAX_SOURCE_BYTES = 32
"""Of a drafter's name for a part of itself, which goes with every commit."""

MAX_WEIGHT = 16.0
"""Of one request's tokens against another's."""

MAX_DURATION_US = 3_600_000_000
"""Of any duration in a message. One of an hour says all there is to say, and sums of them fit a message."""
MAX_DROPPED_TOKENS = 1 << 14
"""In one round: of some sixty drafts. As many in every round of the longest request make a sum that fits a message."""

MAX_STREAM_BYTES = 1 << 20
"""Beyond this size a message on a stream of requests is closed, and the next begun."""
