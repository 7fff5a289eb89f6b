"""Tokenising beside everything else a gateway does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.gateway.tokenizer.threads import SHORT_CHARS, TokenizerThreads
from outrider.gateway.tools.structured import Structured
from outrider.target.grammars.tokenizer import read_tokenizer

LONG = SHORT_CHARS + 1


@pytest.fixture
def threads() -> Iterator[TokenizerThreads]:
    made = TokenizerThreads()
    yield made
    made.close()


async def test_a_long_prompt_holds_up_no_short_one(threads: TokenizerThreads) -> None:
    release = threading.Event()
    long = asyncio.create_task(threads.of("").run(LONG, release.wait))
    async with asyncio.timeout(60):
        assert await threads.of("").run(SHORT_CHARS, lambda: "short") == "short"
        assert not long.done()
        release.set()
        assert await long


async def test_tenants_take_turns(threads: TokenizerThreads) -> None:
    """Also with what checks grammars, which may take as long as a long prompt."""
    release, order = threading.Event(), list[str]()
    first = asyncio.create_task(threads.of("many").run(LONG, release.wait))
    many = [asyncio.create_task(threads.of("many").run(LONG, lambda: order.append("many"))) for _ in range(20)]
    await asyncio.sleep(0)
    other = asyncio.create_task(threads.of("other").run(LONG, lambda: order.append("other")))
    await asyncio.sleep(0)
    release.set()
    async with asyncio.timeout(60):
        await asyncio.gather(first, *many, other)
    assert order.index("other") <= 1


async def test_a_prompt_whose_client_leaves_while_it_waits_is_never_tokenised(threads: TokenizerThreads) -> None:
    release, ran = threading.Event(), []
    first = asyncio.create_task(threads.of("").run(LONG, release.wait))
    waiting = [asyncio.create_task(threads.of("").run(LONG, lambda: ran.append(1))) for _ in range(20)]
    last = asyncio.create_task(threads.of("").run(LONG, lambda: "last"))
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    release.set()
    async with asyncio.timeout(60):
        assert await first
        assert await last == "last"
    assert ran == []


def test_other_threads_run_while_a_text_is_tokenised(tiny: Path) -> None:
    tokenizer = ModelTokenizer.parse(read_tokenizer(tiny))
    done = threading.Event()

    def tokenise() -> None:
        assert len(tokenizer.encode("a1 " * 100_000)) == 300_000
        done.set()

    worker = threading.Thread(target=tokenise)
    worker.start()
    turns = 0
    while not done.is_set():
        time.sleep(0.001)
        turns += 1
    worker.join()
    # Hundreds; two or three where the interpreter's lock is held all the time.
    assert turns > 30


async def test_a_long_chain_in_a_grammar_does_not_end_the_gateway(threads: TokenizerThreads) -> None:
    """The library follows rules and references by recursion."""
    pytest.importorskip("llguidance")
    rules = "\n".join(["start: a0", *(f'a{i}: a{i + 1} | "x"' for i in range(3000)), 'a3000: "y"'])
    places = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1800)} | {"d1800": {"type": "integer"}}
    schema = {"$defs": places, "$ref": "#/$defs/d0"}
    for asked in (Structured("grammar", rules, "x"), Structured("json_schema", schema, "x")):
        assert await threads.of("").run(asked.num_chars, asked.to_grammar)
