"""A paced target whose steps take longer with their rows and with uncached prompts, and that says so in its lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider.prefix import block_hashes
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import target_pb2

from benchmarks.support.paced import Marks, PacedTarget

Publish = Callable[[list[bytes]], None]


@dataclass(frozen=True, slots=True)
class Pace:
    """What a step takes: `base_s`, and this for each row and each token of a prompt."""

    base_s: float = 0.01
    row_s: float = 0.005
    prefill_token_s: float = 0.0001


class CachingTarget(PacedTarget):
    """Its prefix cache forgets nothing."""

    def __init__(self, pace: Pace, publish: Publish, **info: Any) -> None:
        # No KV cache of blocks: what is cached takes no room.
        super().__init__(Marks(), step_s=pace.base_s, **{"num_blocks": 0, **info})
        self.num_opened = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_committed = 0
        self._pace = pace
        self._publish = publish
        self._cached: set[bytes] = set()
        self._to_read = 0
        """Tokens of prompts that the next step reads."""
        self._set_load(0)

    def _set_load(self, num_rows: int) -> None:
        self.load.num_running = num_rows
        self.load.row_ns = round(self._pace.row_s * 1e9)
        self.load.prefill_token_ns = round(self._pace.prefill_token_s * 1e9)

    def _take(self, request: target_pb2.VerifyRequest, rows: Any) -> None:
        for opening in request.opens:
            self._read(opening)
        super()._take(request, rows)

    def _read(self, opening: sequence.OpenSequence) -> None:
        prompt = opening.prompt_token_ids
        hashes = block_hashes(prompt, self.info.block_size, opening.cache_salt)
        matched = next((i for i, block in enumerate(hashes) if block not in self._cached), len(hashes))
        num_cached = matched * self.info.block_size
        self.num_opened += 1
        self.num_prompt_tokens += len(prompt)
        self.num_cached_tokens += num_cached
        self._to_read += len(prompt) - num_cached
        self._cached.update(hashes)
        self._publish(hashes[matched:])

    async def _step_forever(self, rows: Any, context: Any) -> None:
        pace = self._pace
        while True:
            num_rows, to_read, self._to_read = len(rows), self._to_read, 0
            await asyncio.sleep(pace.base_s + num_rows * pace.row_s + to_read * pace.prefill_token_s)
            if rows:
                reply = self._commits(rows)
                self.num_committed += sum(len(commit.token_ids) for commit in reply.commits)
                await context.write(reply)
            self._set_load(len(rows))
