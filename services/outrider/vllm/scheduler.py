"""vLLM's scheduler with drafts from outside: `--scheduler-cls outrider.vllm.scheduler.Scheduler`.

Drafts travel in the scheduler's own output, so the executor and its processes need nothing else. A draft is only a
matter of speed: what escapes from a scheduler ends vLLM's EngineCore, so every fault of ours ends the drafting of the
open requests instead, and they are decoded plainly.

With asynchronous scheduling a step is scheduled while the one before it runs. A draft is then a chain from the tokens
that are known here, and the worker verifies what the chain has after the tokens that the running step commits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as BaseScheduler
from vllm.v1.outputs import DraftTokenIds

from outrider.target.drafts.choice import StepRoom
from outrider.vllm import versions
from outrider.vllm.drafts import ChainRow, DraftBook
from outrider.vllm.front import WORKER

METHOD = "ngram_gpu"
"""Of vLLM's speculation: it makes room for drafts in a step, and the worker has no drafter. With another method vLLM's
own drafts go by the settings of each request, and the request's next step has those that are worth more."""
CHAINS = "outrider_chains"
"""Attribute of the scheduler's output: by request with drafts the position of its chain, and the tokens from there."""

_PLAN_SHARE = 0.5
"""Share of a running step that may pass before the next one is planned: the rest is for planning and preparing it."""
_PLANNING_TIMES = 2.0
"""At least so much is left for that, in times that the last plan took."""
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
    num_tokens: int = 0

    def decodes(self, request_id: str) -> bool:
        """Whether it ran one committed token, and so nothing of a prompt."""
        return self.counts[request_id] == 1 + len(self.drafted.get(request_id, ()))

    @property
    def num_rows(self) -> int:
        """Tokens of requests that decode or verify."""
        if self.num_tokens == len(self.counts) + sum(map(len, self.drafted.values())):
            return self.num_tokens
        return sum(count for name, count in self.counts.items() if self.decodes(name))


@dataclass(slots=True)
class _Scheduled:
    """A step whose output has not come yet."""

    began_s: float
    placed_s: float
    """After what had to be waited for."""
    chains: dict[str, ChainRow] = field(default_factory=dict)
    """What it verifies of each request that vLLM has not drafted, after the tokens that the steps before it commit."""
    sent: dict[str, tuple[int, Sequence[int]]] = field(default_factory=dict)
    """These as the worker gets them."""


class Scheduler(BaseScheduler):
    """Its `book` holds the drafts. Whoever fills it opens and closes the requests there."""

    dynamic_sd_lookup: list[int] | None

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Self:
        if vllm_config.scheduler_config.async_scheduling and not issubclass(cls, AsyncScheduler):
            cls = type(cls.__name__, (cls, AsyncScheduler), {})
        made: Self = super().__new__(cls)
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError for settings under which it cannot draft."""
        super().__init__(*args, **kwargs)
        versions.check()
        self._check_settings()
        method = self.vllm_config.speculative_config.method
        self.drafter = "" if method == METHOD else method
        """Source of the drafts that vLLM makes itself; empty where it makes none."""
        # With it vLLM fills up no new request with drafts that are none.
        self._drafted_at = self.dynamic_sd_lookup or [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        """How many tokens vLLM drafts, by the number of requests."""
        self._draft_nothing = self.dynamic_sd_lookup = [0] * (self.max_num_running_reqs + 1)
        self.book = DraftBook()
        self.verified: dict[str, ChainRow] = {}
        """What the last step did, by request that committed tokens in it."""
        self.ran: Any = None
        """The runner's output of the last step."""
        self.num_preemptions = 0
        self.before_step: Callable[[float], None] = lambda until_s: None
        """Called before each step, to fill the book with what has arrived, and with what comes until then."""
        self.step = StepFacts({}, {}, 0.0)
        self._scheduled: deque[_Scheduled] = deque()
        self._held: Mapping[str, Any] = {}
        """Requests for which something is buffered."""
        self._unknown = [[-1] * count for count in range(self.num_spec_tokens + 1)]
        """Drafted tokens that the worker finds. Nobody changes these lists."""
        self._ended_s = self._planning_s = 0.0

    def _check_settings(self) -> None:
        if self.vllm_config.parallel_config.worker_cls != WORKER:
            raise ValueError(f"worker_cls: must be {WORKER}, which verifies the drafts of this scheduler")
        if self.vllm_config.speculative_config is None:
            raise ValueError(f"speculative_config.method: must be {METHOD}, which makes room for drafts, or a drafter")

    def schedule(self, throttle_prefills: bool = False) -> Any:
        step = _Scheduled(now_s := time.monotonic(), now_s)
        self._safely(lambda: self._place_drafts(step))
        self._scheduled.append(step)
        output = super().schedule(throttle_prefills)
        self._planning_s = time.monotonic() - step.placed_s
        drafted = output.scheduled_spec_decode_tokens
        for name in step.chains.keys() - drafted.keys():
            # It did not come into the step, or without its draft.
            del step.chains[name], step.sent[name]
            if (request := self.requests.get(name)) is not None:
                request.spec_token_ids = []
        if step.sent:
            setattr(output, CHAINS, step.sent)
        return output

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """What vLLM's drafter says, if there is one."""
        if self.drafter:
            super().update_draft_token_ids(draft_token_ids)

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None:
        """Of a step that waits for a grammar. What the step before it commits is known now."""
        chains = getattr(scheduler_output, CHAINS, {})
        counts = {name: len(ids) for name, ids in scheduler_output.scheduled_spec_decode_tokens.items()}
        known = [name for name in counts if name in self.requests and name in chains]
        drafts = {name: _following(chains[name], self.requests[name].all_token_ids, counts[name]) for name in known}
        if self.drafter:
            drafts = dict(zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)) | drafts
        super().update_draft_token_ids_in_output(DraftTokenIds([*drafts], [*drafts.values()]), scheduler_output)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.verified.clear()
        self.ran = model_runner_output
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        step = self._scheduled.popleft() if self._scheduled else _Scheduled(now_s := time.monotonic(), now_s)
        self._safely(lambda: self._follow(step, scheduler_output, outputs, model_runner_output))
        return outputs

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.num_preemptions += 1
        super()._preempt_request(*args, **kwargs)

    @property
    def plan_by_s(self) -> float:
        """Until when the next step may be planned without holding up the device. 0 while no step runs."""
        if not self._scheduled:
            return 0.0
        step_s = self.book.cost.step_s
        return self._ended_s + min(_PLAN_SHARE * step_s, step_s - _PLANNING_TIMES * self._planning_s)

    @property
    def num_faults(self) -> int:
        return self.book.num_faults

    def _safely(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            self.book.forget_all()
            for request in self.running:
                request.spec_token_ids = []

    def _place_drafts(self, step: _Scheduled) -> None:
        self.before_step(self.plan_by_s)
        step.placed_s = time.monotonic()
        own_sums = self._cut_own() if self.drafter else {}
        book, requests, price = self.book, self.requests, self.book.row_price
        self._held = book.drafted
        # In a large batch no token may be worth its row.
        names = [name for name, drafts in self._held.items() if drafts.speculation.weight >= price]
        if not names:
            return
        decoding = [one for name in names if (one := self._decoding(requests.get(name))) is not None]
        for row in book.choose(decoding, self._room(), own_sums):
            request, token_ids = requests[row.request_id], row.token_ids
            if row.num_ahead:
                request.spec_token_ids = self._unknown[row.count]
            else:
                request.spec_token_ids = self.structured_output_manager.validate_tokens(request, [*token_ids])
            step.chains[row.request_id], step.sent[row.request_id] = row, (row.base_len, token_ids)

    def _cut_own(self) -> dict[str, float]:
        """Leaves each request as many of vLLM's own drafts as it may have and as are worth their rows. What they are
        worth, by request."""
        own_sums, book = dict[str, float](), self.book
        for request in self.running:
            values = book.own_values(request.request_id, self.drafter, self.num_spec_tokens)
            request.spec_token_ids = request.spec_token_ids[: len(values)]
            if values:
                own_sums[request.request_id] = sum(values[: len(request.spec_token_ids)])
        # The drafter runs while it may be of use.
        self.dynamic_sd_lookup = self._drafted_at if own_sums or self.waiting else self._draft_nothing
        return own_sums

    def _decoding(self, request: Any) -> ChainRow | None:
        """None for a request of which more than the last token is still to be run."""
        if request is None:
            return None
        ahead, num_tokens = request.num_output_placeholders, request.num_tokens
        end = num_tokens + ahead
        num_output = end - request.num_prompt_tokens
        if not num_output or end - request.num_computed_tokens != 1:
            return None
        left = min(request.max_tokens - num_output, self.max_model_len - end)
        return ChainRow(request.request_id, num_tokens, max(0, min(self.num_spec_tokens, left - 1)), ahead)

    def _room(self) -> StepRoom:
        blocks, running = self.kv_cache_manager.block_pool.get_num_free_blocks(), len(self.running)
        most = self.max_num_scheduled_tokens
        prompts = bool(self._inflight_prefills or self.waiting)
        tokens = most - running - (int(most * _PREFILL_SHARE) if prompts else 0)
        return StepRoom(max(0, tokens), max(0, blocks - running), self.block_size)

    def _follow(self, step: _Scheduled, scheduler_output: Any, outputs: Mapping[int, Any], ran: Any) -> None:
        drafted = scheduler_output.scheduled_spec_decode_tokens
        # Steps overlap when they are scheduled asynchronously.
        now_s = time.monotonic()
        seconds, self._ended_s = now_s - max(step.began_s, self._ended_s), now_s
        counts, total = scheduler_output.num_scheduled_tokens, scheduler_output.total_num_scheduled_tokens
        self.step = StepFacts(counts, drafted, seconds, total)
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        if touched := self._held.keys() | drafted.keys():
            for group in outputs.values():
                for output in group.outputs:
                    if (name := output.request_id) in touched and output.new_token_ids:
                        found = drafted.get(name, ())
                        # vLLM accepts none of those that a grammar has cut off, though the text may go on with them.
                        self._commit(output, found[: len(found) - invalid.get(name, 0)], step.chains, ran)
        rows, tokens = self.step.num_rows, sum(map(len, ran.sampled_token_ids))
        self.book.stepped(rows=rows, prompt_tokens=total - rows, tokens=tokens, seconds=seconds)

    def _commit(self, output: Any, drafted: Sequence[int], chains: Mapping[str, ChainRow], ran: Any) -> None:
        """What one request commits. `drafted`: what the step has verified of it."""
        name, token_ids = output.request_id, output.new_token_ids
        chain, finished = chains.get(name), output.finish_reason is not None
        if self.drafter and drafted and chain is None:
            num_drawn = len(ran.sampled_token_ids[ran.req_id_to_index[name]])
            chain = self.book.own_chain(name, self.drafter, drafted, token_ids, num_drawn - 1)
        self.verified[name] = self.book.committed(name, token_ids, chain, len(drafted), finished=finished)


def _following(chain: tuple[int, Sequence[int]], tokens: Sequence[int], count: int) -> list[int]:
    """What the worker verifies of a chain, once all tokens before are known."""
    first, token_ids = chain
    done = len(tokens) - first
    found = token_ids[done : done + count] if done >= 0 and [*tokens[first:]] == [*token_ids[:done]] else ()
    return [*found, *([0] * (count - len(found)))]
