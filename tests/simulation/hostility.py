"""Hostile peers: messages about drafts are lost, repeated, delayed or forged.

A draft may only affect latency, so nothing here may change a text, end a request or leak a resource.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from outrider.rpc.v1 import sequence_pb2 as sequence

from tests.simulation.hash_model import VOCAB_SIZE
from tests.simulation.network import Stream

DRAFT_PATH = "/outrider.rpc.v1.DraftService/Draft"
TARGET_PATH = "/outrider.rpc.v1.TargetService/Verify"


class Hostility:
    """The network's `tamper` hook. `share_of(stream)`: share of a draft's messages to tamper with, both ways."""

    def __init__(self, rng: random.Random, share_of: Callable[[Stream], float]) -> None:
        self.num_tampered = 0
        self._rng = rng
        self._share_of = share_of

    def __call__(self, stream: Stream, to_server: bool, message: Any) -> list[Any]:
        if stream.path == DRAFT_PATH and (share := self._share_of(stream)):
            # Messages that open or close a sequence are not changed: gRPC does not lose them.
            field = "commits" if to_server else "drafts"
            return [self._tampered(stream, message, field, share)]
        return [message]

    def _tampered(self, stream: Stream, message: Any, field: str, share: float) -> Any:
        copy = type(message)()
        copy.CopyFrom(message)
        items = list(getattr(copy, field))
        held: list[Any] = stream.facts.setdefault(f"held {field}", [])
        past: list[Any] = stream.facts.setdefault(f"past {field}", [])
        kept: list[Any] = []
        for item in items:
            past.append(item)
            kept += self._fate(item, held, past) if self._rng.random() < share else [item]
        if held and self._rng.random() < 0.5:
            kept.insert(self._rng.randint(0, len(kept)), held.pop(0))
        del past[:-20]
        copy.ClearField(field)
        getattr(copy, field).extend(kept)
        return copy

    def _fate(self, item: Any, held: list[Any], past: list[Any]) -> list[Any]:
        self.num_tampered += 1
        rng = self._rng
        match rng.choice(("lost", "twice", "late", "old", "forged", "taken back")):
            case "lost":
                return []
            case "twice":
                return [item, item]
            case "late":
                held.append(item)
                return []
            case "old":
                return [rng.choice(past), item]
            case "taken back" if isinstance(item, sequence.Draft):
                return [item, _in_its_place(item)]
            case _:
                return [self._forged(item)]

    def _forged(self, item: Any) -> Any:
        forged = type(item)()
        forged.CopyFrom(item)
        if isinstance(item, sequence.Commit):
            forged.base_len = max(0, item.base_len + self._rng.randint(-3, 3))
            return forged
        _FORGERIES[self._rng.randrange(len(_FORGERIES))](forged, self._rng)
        return forged


def _in_its_place(draft: sequence.Draft) -> sequence.Draft:
    """The next message, which takes this one back and proposes the same as something new."""
    again = sequence.Draft()
    again.CopyFrom(draft)
    again.epoch += 1
    again.serial += 1
    return again


def _move(draft: sequence.Draft, rng: random.Random) -> None:
    draft.base_len = max(0, draft.base_len + rng.randint(-4, 4))


def _change_token(draft: sequence.Draft, rng: random.Random) -> None:
    if draft.token_ids:
        draft.token_ids[rng.randrange(len(draft.token_ids))] = rng.randrange(VOCAB_SIZE)


def _unknown_token(draft: sequence.Draft, rng: random.Random) -> None:
    draft.token_ids.append(VOCAB_SIZE + rng.randrange(1000))


def _change_epoch(draft: sequence.Draft, rng: random.Random) -> None:
    draft.epoch = max(0, draft.epoch + rng.randint(-2, 2))


def _lengthen(draft: sequence.Draft, rng: random.Random) -> None:
    draft.token_ids.extend(rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 80)))


def _add_q(draft: sequence.Draft, rng: random.Random) -> None:
    draft.q.add(token_ids=[rng.randrange(VOCAB_SIZE)], counts=[rng.choice((0, 1, 65536))])


def _grow_a_tree(draft: sequence.Draft, rng: random.Random) -> None:
    draft.parents.extend(rng.randint(-1, 3) for _ in draft.token_ids)


def _go_elsewhere(draft: sequence.Draft, rng: random.Random) -> None:
    draft.sequence_id = max(0, draft.sequence_id + rng.randint(-2, 2))


def _empty(draft: sequence.Draft, rng: random.Random) -> None:
    del draft.token_ids[:]


_FORGERIES: tuple[Callable[[sequence.Draft, random.Random], None], ...] = (
    _move,
    _change_token,
    _unknown_token,
    _change_epoch,
    _lengthen,
    _add_q,
    _grow_a_tree,
    _go_elsewhere,
    _empty,
)
