"""Paced targets in their own process, with leases: python -m benchmarks.support.paced_fleet URL TARGETS PLACES."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from typing import Any

from outrider.metadata import MetadataStore
from outrider.protocol.tokenizers import sha256_of
from outrider.runtime.collector import gc_frozen

from benchmarks.support.paced import Marks, PacedTarget
from tests.fakes import serving_target

MODEL = "paced"


async def _main(url: str, num_targets: int, places: int) -> None:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(MetadataStore.connect(url))
        # As a control plane does: until then gateways answer nobody.
        await store.tenants.keep_required()
        tokenizer = _tokenizer()
        info: dict[str, Any] = {
            "model": MODEL,
            "max_sequences": places,
            "num_blocks": 0,
            "tokenizer_sha256": sha256_of(tokenizer),
        }
        for _ in range(num_targets):
            target = PacedTarget(Marks(), step_s=0.01, row_s=0.002, prefill_token_s=0.0001, **info)
            target.tokenizer = tokenizer
            await stack.enter_async_context(serving_target(target))
            await stack.enter_async_context(store.register(target.info, target.address, lambda it=target: it.load))  # type: ignore[misc]
        with gc_frozen():
            await asyncio.Event().wait()


def _tokenizer() -> bytes:
    """Any tokenizer: prompts are token ids."""
    # Imported here: users of the model's name do not need transformers.
    from outrider.target.grammars.tokenizer import describe
    from outrider.testing.tiny import tiny_tokenizer

    return describe(tiny_tokenizer()).SerializeToString(deterministic=True)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
