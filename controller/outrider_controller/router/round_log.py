"""Rounds of one request as they are kept: a few bytes each, written on the path of a token, read when somebody asks.

A commit is kept as the message it came as. Making a RoundTrace of it at once would cost a round ten times as much.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import trace_pb2 as trace

from outrider_controller.router.policy import Setting

# Time of arrival, max_wait_us, sequences in the batch, tokens committed, max_draft_tokens; sizes of what follows:
# commit, timing, source.
_HEAD = struct.Struct("<QIIIIIHB")
_MAX_SOURCE_BYTES = 255


class RoundLog:
    """Written in order, and read as a whole."""

    __slots__ = ("_bytes", "num_rounds")

    def __init__(self) -> None:
        self.num_rounds = 0
        self._bytes = bytearray()

    def __bytes__(self) -> bytes:
        """For `rounds_of`."""
        return bytes(self._bytes)

    def add(
        self,
        commit: sequence.Commit,
        timing: router.RoundTiming,
        *,
        setting: Setting,
        source: str,
        batch_sequences: int,
        at_us: int,
        tokens: bool,
    ) -> None:
        """One commit. Without `tokens` their ids are left out."""
        num_tokens = len(commit.token_ids)
        if not tokens:
            commit = _without_tokens(commit)
        said, times, named = commit.SerializeToString(), timing.SerializeToString(), source.encode()[:_MAX_SOURCE_BYTES]
        self._bytes += _HEAD.pack(
            at_us,
            setting.max_wait_us,
            batch_sequences,
            num_tokens,
            setting.max_draft_tokens,
            len(said),
            len(times),
            len(named),
        )
        self._bytes += said
        self._bytes += times
        self._bytes += named
        self.num_rounds += 1


def rounds_of(log: bytes) -> Iterator[trace.RoundTrace]:
    """What a RoundLog's bytes say."""
    at = 0
    while at < len(log):
        at_us, max_wait_us, batch_sequences, num_tokens, max_draft_tokens, *sizes = _HEAD.unpack_from(log, at)
        at += _HEAD.size
        said, times, named = (log[at + sum(sizes[:i]) : at + sum(sizes[: i + 1])] for i in range(3))
        at += sum(sizes)
        commit = sequence.Commit.FromString(said)
        yield trace.RoundTrace(
            at_us=at_us,
            base_len=commit.base_len,
            token_ids=commit.token_ids,
            rejected_token_ids=commit.rejected_token_ids,
            num_tokens=num_tokens,
            num_drafted=commit.num_drafted,
            num_verified=commit.num_verified,
            num_accepted=commit.num_accepted,
            num_dropped=commit.num_dropped,
            max_draft_tokens=max_draft_tokens,
            max_wait_us=max_wait_us,
            timing=router.RoundTiming.FromString(times),
            batch_sequences=batch_sequences,
            source=named.decode(errors="replace"),
        )


def _without_tokens(commit: sequence.Commit) -> sequence.Commit:
    copy = sequence.Commit()
    copy.CopyFrom(commit)
    copy.ClearField("token_ids")
    copy.ClearField("rejected_token_ids")
    return copy
