"""A paced target whose step time grows with rows and uncached prompt tokens, and which reports these times."""

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
class StepTimes:
    """Step time: `base_s`, plus a time for each row and for each uncached prompt token."""

    base_s: float = 0.01
    row_s: float = 0.005
    prefill_token_s: float = 0.0001


class CachingTarget(PacedTarget):
    """Its prefix cache never evicts."""

    def __init__(self, times: StepTimes, publish: Publish, **info: Any) -> None:
        # No KV blocks: cached prefixes need no room.
        super().__init__(Marks(), step_s=times.base_s, **{"num_blocks": 0, **info})
        self.num_opened = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_committed = 0
        self._times = times
        self._publish = publish
        self._cached: set[bytes] = set()
        self._to_read = 0
        """Prompt tokens that the next step prefills."""
        self._set_load(0)

    def _set_load(self, num_rows: int) -> None:
        self.load.num_running = num_rows
        self.load.row_ns = round(self._times.row_s * 1e9)
        self.load.prefill_token_ns = round(self._times.prefill_token_s * 1e9)

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
        times = self._times
        while True:
            num_rows, to_read, self._to_read = len(rows), self._to_read, 0
            await asyncio.sleep(times.base_s + num_rows * times.row_s + to_read * times.prefill_token_s)
            if rows:
                reply = self._commits(rows)
                self.num_committed += sum(len(commit.token_ids) for commit in reply.commits)
                await context.write(reply)
            self._set_load(len(rows))
