"""The control plane reads a vocabulary as gateways do, asks for each once, and goes on without."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from outrider.errors import Unavailable
from outrider.metadata import LeaseRecord
from outrider.rpc.v1 import tokenizer_pb2, worker_pb2
from outrider.token_bytes import TokenBytes
from outrider_controller.control.console import vocabulary
from outrider_controller.control.console.vocabulary import ConsoleVocabulary, read
from tokenizers import Tokenizer, decoders, models

PIECES = ["<unk>", "▁tea", "▁", "s"]


def sent(tokenizer: Tokenizer) -> bytes:
    return tokenizer_pb2.Tokenizer(json=tokenizer.to_str().encode()).SerializeToString()


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in PIECES], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


@pytest.mark.parametrize("make", [word_level, unigram])
def test_tokens_have_the_bytes_that_gateways_send_and_special_ones_their_names(make: Any) -> None:
    table, theirs = read(sent(make())), TokenBytes.of_tokenizer(make())
    assert [table.of(i) for i in range(4)] == [theirs.of(i) for i in range(4)]
    assert (table.of(1), table.of(4), table.of(5)) == (b" tea", b"<|end|>", b"")


@pytest.mark.parametrize("data", [b"\xff", tokenizer_pb2.Tokenizer(json=b"{}").SerializeToString(), b""])
def test_what_is_no_tokenizer_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        read(data)


@dataclass
class Fleet:
    """One target, and a router that sends its tokenizer when it may."""

    asked: int = 0
    fails: bool = False
    may_send: asyncio.Event = field(default_factory=asyncio.Event)

    async def workers(self, role: Any = None) -> list[LeaseRecord]:
        info = worker_pb2.WorkerInfo(role=worker_pb2.WORKER_ROLE_TARGET, worker_id="target-1", model="large")
        info.tokenizer_sha256 = "ab"
        return [LeaseRecord(info, worker_pb2.WorkerLoad(), "127.0.0.1:1", 1)]

    async def tokenizer(self, model: str, sha256: str) -> bytes:
        assert (model, sha256) == ("large", "ab")
        self.asked += 1
        await self.may_send.wait()
        if self.fails:
            raise Unavailable("no router sends it")
        return sent(word_level())


async def test_one_that_comes_late_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_PATIENCE_S", 0.01)
    fleet = Fleet()
    known = ConsoleVocabulary(fleet, fleet)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await known.of("large")
    fleet.may_send.set()
    monkeypatch.setattr(vocabulary, "_PATIENCE_S", 10.0)
    for _ in range(2):
        table = await known.of("large")
        assert table is not None and table.of(1) == b" tea"
    assert fleet.asked == 1
    assert await known.of("unknown") is None


async def test_one_that_could_not_be_had_is_asked_for_again_when_next_wanted() -> None:
    fleet = Fleet(fails=True)
    fleet.may_send.set()
    known = ConsoleVocabulary(fleet, fleet)
    assert await known.of("large") is None
    fleet.fails = False
    assert await known.of("large") is not None
    assert fleet.asked == 2
