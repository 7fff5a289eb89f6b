"""Rounds of one request as they are kept: some hundred bytes each, written on the path of a token, read when somebody
asks. Making a RoundTrace of each at once would cost a round ten times as much.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator

from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import trace_pb2 as trace

from outrider_controller.router.policy import Setting
from outrider_controller.router.round import Round

# Time of arrival; then, in the order of `add`, what the round did, how it was set, where its time went; numbers of what
# follows: tokens, rejected tokens, bytes of the source.
_HEAD = struct.Struct("=Q6I3I8I2IB")
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

    def add(self, done: Round, *, setting: Setting, batch_sequences: int, at_us: int, tokens: bool) -> None:
        """One round. Without `tokens` their ids are left out."""
        token_ids, rejected = done.token_ids, done.rejected
        source = done.source.encode()[:_MAX_SOURCE_BYTES]
        self._bytes += _HEAD.pack(
            at_us,
            done.base_len,
            len(token_ids),
            done.num_drafted,
            done.num_verified,
            done.num_accepted,
            done.num_dropped,
            setting.max_draft_tokens,
            setting.max_wait_us,
            batch_sequences,
            done.round_us,
            done.draft_us,
            done.verify_us,
            done.queue_us,
            done.wait_us,
            done.prefill_us,
            done.compute_us,
            done.wire_us,
            len(token_ids) if tokens else 0,
            len(rejected) if tokens else 0,
            len(source),
        )
        if tokens:
            self._bytes += array("I", token_ids + rejected)
        self._bytes += source
        self.num_rounds += 1


def rounds_of(log: bytes) -> Iterator[trace.RoundTrace]:
    """What a RoundLog's bytes say."""
    at = 0
    while at < len(log):
        head = _HEAD.unpack_from(log, at)
        num_kept, num_rejected, num_source_bytes = head[-3:]
        at += _HEAD.size
        tokens = array("I", log[at : at + 4 * (num_kept + num_rejected)])
        at += 4 * len(tokens)
        source = log[at : at + num_source_bytes]
        at += num_source_bytes
        yield _round(head, tokens[:num_kept], tokens[num_kept:], source.decode(errors="replace"))


def _round(head: tuple[int, ...], token_ids: array[int], rejected: array[int], source: str) -> trace.RoundTrace:
    at_us, base_len, num_tokens, num_drafted, num_verified, num_accepted, num_dropped, *rest = head
    max_draft_tokens, max_wait_us, batch_sequences, *times = rest[:-3]
    round_us, draft_us, verify_us, queue_us, wait_us, prefill_us, compute_us, wire_us = times
    return trace.RoundTrace(
        at_us=at_us,
        base_len=base_len,
        token_ids=token_ids,
        rejected_token_ids=rejected,
        num_tokens=num_tokens,
        num_drafted=num_drafted,
        num_verified=num_verified,
        num_accepted=num_accepted,
        num_dropped=num_dropped,
        max_draft_tokens=max_draft_tokens,
        max_wait_us=max_wait_us,
        timing=router.RoundTiming(
            round_us=round_us,
            draft_us=draft_us,
            verify_us=verify_us,
            queue_us=queue_us,
            wait_us=wait_us,
            prefill_us=prefill_us,
            compute_us=compute_us,
            wire_us=wire_us,
        ),
        batch_sequences=batch_sequences,
        source=source,
    )
