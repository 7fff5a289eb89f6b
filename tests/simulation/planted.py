"""Faults planted in the shipped code, each of which the simulation must find; otherwise its passing has no meaning.

Faults that only cost time are not among them: a misplaced, stale or invented draft changes no text, because the target
verifies it. `hostility` shows this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any

from outrider.draft.worker import DraftWorker
from outrider.drafting.buffer import DraftBuffer
from outrider.engine.kv.blocks import BlockPool
from outrider.engine.kv.kv_cache_manager import KVCacheManager
from outrider.gateway.generation.answers import Answer
from outrider.speculation import Candidate, verification
from outrider.target.drafts.pool import PoolDrafts
from outrider.target.requests import wire
from outrider.target.requests.row import StepRow
from outrider.target.step import own_engine, verify
from outrider.target.step.sequence import TargetSequence
from outrider.worker.events import PeerStreamEnded, Refused
from outrider_controller.router.request.state import RequestState
from outrider_controller.router.requests import sequences
from outrider_controller.router.requests.dispatcher import Dispatcher
from outrider_controller.router.requests.sequences import SequenceEvents


class Planted(Enum):
    """The value describes the fault."""

    UNVERIFIED = "a drafted token is accepted unverified"
    SHIFTED_NOISE = "noise is keyed one position too far when there are drafts"
    STOP_IGNORED = "a stop token inside an accepted block does not stop"
    LENGTH_OFF_BY_ONE = "a sequence may have one token too many"
    SHARE_UNCOUNTED = "a block that was found in the prefix cache may be given away while it is in use"
    BLOCK_LEAKED = "a closed sequence keeps its last KV block"
    SLOT_OFF_BY_ONE = "an accepted token's keys are moved from the slot before its own"
    PARENT_NOT_TAKEN = "a token of a tree is run as if the one before it were not taken"
    OTHER_EPOCH = "a tree goes on from one that its draft has taken back"
    PREEMPTED_KEPT = "a preempted sequence's blocks are not given back"
    DRAFT_ENDS_SEQUENCE = "a malformed draft ends its sequence"
    CLOSE_FORGOTTEN = "a target is not told that a request was cancelled"
    STREAM_END_FORGOTTEN = "a draft keeps the sequences of a target that is gone"
    DRAFT_SEQUENCE_KEPT = "a target does not tell its draft that a sequence has ended"
    PREFIX_FORGOTTEN = "a failover opens without what was committed"
    COMMITTED_CHANGED = "a failover goes on from another token than the last that was committed"
    RESUME_FORGOTTEN = "a request goes to the next router without what was delivered"
    WAKE_LOST = "a request is woken only once"
    POSITION_UNCHECKED = "a router takes a commit at any position, twice"


@contextmanager
def planted(fault: Planted) -> Iterator[None]:
    """Plants the fault in the shipped code for the block."""
    owner, name, make = _FAULTS[fault]
    shipped = owner.__dict__[name]
    setattr(owner, name, make(shipped))
    try:
        yield
    finally:
        setattr(owner, name, shipped)


def _unverified(shipped: Any) -> Any:
    def walk(row: Any, own: Any) -> None:
        shipped(row, own)
        if row.draft and not row.accepted:
            row.decide([row.draft.token_ids[0]], [0], 1)

    return walk


def _shifted(shipped: property) -> property:
    return property(lambda row: [at + bool(row.draft) for at in shipped.fget(row)])  # type: ignore[misc]


def _no_stop(shipped: Any) -> Any:
    def until_end(row: Any, stop_token_ids: Any, remaining: int) -> None:
        shipped(row, stop_token_ids if len(row.token_ids) == 1 else set(), remaining)

    return until_end


def _one_more(shipped: property) -> property:
    return property(lambda sequence: shipped.fget(sequence) + 1)  # type: ignore[misc]


def _uncounted(shipped: Any) -> Any:
    def find(pool: Any, hashes: list[bytes]) -> list[int]:
        found: list[int] = shipped(pool, hashes)
        for block in found:
            if pool._references[block] == 1:
                pool._cached[block] = None
        return found

    return find


def _leak(shipped: Any) -> Any:
    def close(manager: Any, sequence: Any) -> None:
        del sequence.blocks[-1:]
        shipped(manager, sequence)

    return close


def _off_by_one(shipped: Any) -> Any:
    def keep(manager: Any, sequence: Any, path: Any) -> None:
        before = len(manager._moves)
        shipped(manager, sequence, path)
        manager._moves[before:] = [(source - 1, target) for source, target in manager._moves[before:]]

    return keep


def _without_parents(shipped: Any) -> Any:
    def engine_row(row: Any) -> Any:
        made = shipped(row)
        return replace(made, parents=(-1,) * len(made.parents)) if row.draft.parents else made

    return engine_row


def _any_epoch(shipped: Any) -> Any:
    def offer(buffer: Any, tree: Any, *others: Any) -> None:
        if (held := buffer._sent.get(tree.source)) is not None:
            origins = tuple(map(held.origin, range(len(held))))
            buffer._sent[tree.source] = replace(held, epoch=tree.epoch, origins=origins)
        shipped(buffer, tree, *others)

    return offer


def _keep_preempted(shipped: Any) -> Any:
    def preempt(engine: Any, victim: Any) -> None:
        victim.kv = None
        engine.num_preemptions += 1

    return preempt


def _end_at_draft(shipped: Any) -> Any:
    def lose(pool: Any, key: Any, problem: Any) -> None:
        shipped(pool, key, problem)
        pool._post([Refused(key, problem)])

    return lose


def _no_close(shipped: Any) -> Any:
    def end(dispatcher: Any, active: Any, reason: Any) -> None:
        dispatcher.table.drop_target(active, None)
        shipped(dispatcher, active, reason)

    return end


def _no_stream_end(shipped: Any) -> Any:
    def apply(draft: Any, event: Any) -> None:
        if not isinstance(event, PeerStreamEnded):
            shipped(draft, event)

    return apply


def _no_unpair(shipped: Any) -> Any:
    def unpair(pool: Any, found: Any, reason: Any) -> None:
        if found.pooled is not None:
            found.pooled.link.keys.pop(found.pooled.sequence_id, None)
        found.pooled = None

    return unpair


def _no_prefix(shipped: Any) -> Any:
    def opening_for_target(*given: Any) -> Any:
        message = shipped(*given)
        del message.committed_token_ids[:]
        return message

    return opening_for_target


def _other_committed(shipped: Any) -> Any:
    def spec_of(message: Any, limits: Any) -> Any:
        if message.committed_token_ids:
            message.committed_token_ids[-1] ^= 1
        return shipped(message, limits)

    return spec_of


def _no_resume(shipped: Any) -> Any:
    def route_request(job: Any) -> Any:
        message = shipped(job)
        del message.resume_token_ids[:]
        return message

    return route_request


def _wake_once(shipped: Any) -> Any:
    def wake(events: Any) -> None:
        if not hasattr(events, "woken"):
            events.woken = True
            shipped(events)

    return wake


def _any_position(shipped: Any) -> Any:
    def apply(state: Any, done: Any) -> None:
        done.base_len = state.committed_len
        shipped(state, done)
        if not state.finished and len(state.committed) == 5:
            state.committed.pop()

    return apply


_FAULTS: dict[Planted, tuple[Any, str, Callable[[Any], Any]]] = {
    Planted.UNVERIFIED: (verification, "walk", _unverified),
    Planted.SHIFTED_NOISE: (Candidate, "positions", _shifted),
    Planted.STOP_IGNORED: (StepRow, "until_end", _no_stop),
    Planted.LENGTH_OFF_BY_ONE: (TargetSequence, "remaining", _one_more),
    Planted.SHARE_UNCOUNTED: (BlockPool, "find", _uncounted),
    Planted.BLOCK_LEAKED: (KVCacheManager, "close", _leak),
    Planted.SLOT_OFF_BY_ONE: (KVCacheManager, "keep", _off_by_one),
    Planted.PARENT_NOT_TAKEN: (verify, "_engine_row", _without_parents),
    Planted.OTHER_EPOCH: (DraftBuffer, "offer", _any_epoch),
    Planted.PREEMPTED_KEPT: (own_engine.OwnEngine, "preempt", _keep_preempted),
    Planted.DRAFT_ENDS_SEQUENCE: (PoolDrafts, "_lose", _end_at_draft),
    Planted.CLOSE_FORGOTTEN: (Dispatcher, "end", _no_close),
    Planted.STREAM_END_FORGOTTEN: (DraftWorker, "apply", _no_stream_end),
    Planted.DRAFT_SEQUENCE_KEPT: (PoolDrafts, "_unpair", _no_unpair),
    Planted.PREFIX_FORGOTTEN: (sequences, "opening_for_target", _no_prefix),
    Planted.COMMITTED_CHANGED: (wire, "spec_of", _other_committed),
    Planted.RESUME_FORGOTTEN: (Answer, "route_request", _no_resume),
    Planted.WAKE_LOST: (SequenceEvents, "wake", _wake_once),
    Planted.POSITION_UNCHECKED: (RequestState, "apply", _any_position),
}
