"""vLLM's scheduler with drafts from outside: `--scheduler-cls outrider.vllm.scheduler.Scheduler`.

Drafts travel in the scheduler's own output, so the runner, the executor and tensor parallelism know nothing of them. A
draft is only a matter of speed: what escapes from a scheduler ends vLLM's EngineCore, so every fault of ours ends the
drafting of the open requests instead, and they are decoded plainly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler as BaseScheduler

from outrider.vllm.drafts import Decoding, DraftBook, StepRoom, VerifiedDraft

log = logging.getLogger(__name__)

_PREFILL_SHARE = 0.25
"""Share of a step that drafts leave to prompts while there are any."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What one step ran."""

    counts: Mapping[str, int]
    """Tokens of each request."""
    drafted: Mapping[str, Sequence[int]]
    """Of these, the drafted ones."""
    seconds: float

    def decodes(self, request_id: str) -> bool:
        """Whether it ran one committed token, and so nothing of a prompt."""
        return self.counts[request_id] == 1 + len(self.drafted.get(request_id, ()))

    @property
    def num_tokens(self) -> int:
        return sum(self.counts.values())

    @property
    def num_rows(self) -> int:
        """Tokens of requests that decode or verify."""
        return sum(count for name, count in self.counts.items() if self.decodes(name))


class Scheduler(BaseScheduler):
    """Its `book` holds the drafts. Whoever fills it opens and closes the requests there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.book = DraftBook(self.vllm_config.model_config.get_vocab_size())
        self.verified: dict[str, VerifiedDraft] = {}
        """What the last step did, by request that committed tokens in it."""
        self.num_faults = self.num_preemptions = 0
        self.before_step: Callable[[], None] = lambda: None
        """Called before each step, to fill the book with what has arrived."""
        self.step = StepFacts({}, {}, 0.0)
        self._began_s = 0.0

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self._safely(self._place_drafts)
        self._began_s = time.monotonic()
        return super().schedule(throttle_prefills)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """The proposer says nothing."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.verified.clear()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        committed = [one for group in outputs.values() for one in group.outputs]
        self._safely(lambda: self._follow(scheduler_output, committed))
        return outputs

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.num_preemptions += 1
        super()._preempt_request(*args, **kwargs)

    def _safely(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            log.exception("drafting ends for %d open requests", len(self.book))
            self.num_faults += 1
            self.book.clear()
            for request in self.running:
                request.spec_token_ids = []

    def _place_drafts(self) -> None:
        for request in self.running:
            request.spec_token_ids = []
        self.before_step()
        if not len(self.book):
            return
        decoding = [one for request in self.running if (one := self._decoding(request)) is not None]
        chosen = self.book.choose(decoding, self._room(len(decoding)))
        for request_id, token_ids in chosen.items():
            request = self.requests[request_id]
            request.spec_token_ids = self.structured_output_manager.validate_tokens(request, token_ids)

    def _decoding(self, request: Any) -> Decoding | None:
        """None for a request of which more than the last token is still to be run."""
        if not request.num_output_tokens or request.num_tokens - request.num_computed_tokens != 1:
            return None
        left = min(request.max_tokens - request.num_output_tokens, self.max_model_len - request.num_tokens)
        room = min(self.num_spec_tokens, left - 1)
        missing = request.sampling_params.min_tokens - request.num_output_tokens
        if missing > 0:
            # vLLM masks stop tokens after the last drafted one while the committed ones are fewer than min_tokens.
            room = min(room, missing - 1)
        return Decoding(request.request_id, request.num_tokens, max(0, room))

    def _room(self, num_decoding: int) -> StepRoom:
        blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        most = self.max_num_scheduled_tokens
        prompts = len(self.running) > num_decoding or bool(self.waiting)
        tokens = most - num_decoding - (int(most * _PREFILL_SHARE) if prompts else 0)
        return StepRoom(max(0, tokens), max(0, blocks - num_decoding), self.block_size)

    def _follow(self, scheduler_output: Any, outputs: Sequence[Any]) -> None:
        drafted = scheduler_output.scheduled_spec_decode_tokens
        seconds = time.monotonic() - self._began_s
        self.step = StepFacts(scheduler_output.num_scheduled_tokens, drafted, seconds)
        for output in outputs:
            if output.new_token_ids:
                finished = output.finish_reason is not None
                self.verified[output.request_id] = self.book.committed(
                    output.request_id, output.new_token_ids, drafted.get(output.request_id, ()), finished=finished
                )
        self.book.stepped(
            rows=self.step.num_rows,
            prompt_tokens=self.step.num_tokens - self.step.num_rows,
            tokens=sum(len(output.new_token_ids) for output in outputs),
            seconds=seconds,
        )
