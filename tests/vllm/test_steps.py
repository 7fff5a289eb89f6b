"""Drafts from outside in vLLM's scheduler, with a made-up model: while requests are preempted, aborted and resumed, and
a grammar cuts drafts off, it commits what vLLM's own scheduler commits, and counts what the worker has accepted."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from benchmarks.vllm_host import make_scheduler, new_request
from tests.vllm.second_runner import KINDS, Drafts

VOCAB, STEPS, RUNNING = 5, 2_000, 6

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def drawn(tokens: list[int]) -> int:
    """What follows these. Of so few ids that one of no draft is often drawn."""
    return crc32(bytes(tokens)) % VOCAB


def continued(tokens: list[int], count: int) -> list[int]:
    found = [*tokens]
    for _ in range(count):
        found.append(drawn(found))
    return found[len(tokens) :]


class Device:
    """What the worker does with a step."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        """Tokens whose keys and values are right."""

    def run(self, step: Any) -> Any:
        from outrider.vllm.scheduler import CHAINS
        from vllm.v1.outputs import ModelRunnerOutput

        for name in step.finished_req_ids | (step.preempted_req_ids or set()):
            self.tokens.pop(name, None)
        for new in step.scheduled_new_reqs:
            self.tokens[new.req_id], self.computed[new.req_id] = [*new.prefill_token_ids], new.num_computed_tokens
        sampled, chains = [], getattr(step, CHAINS, {})
        for name, num_rows in step.num_scheduled_tokens.items():
            tokens, num_drafted = self.tokens[name], len(step.scheduled_spec_decode_tokens.get(name, ()))
            begin, found = self.computed[name] + num_rows - num_drafted, list[int]()
            num_valid = num_drafted - (step.num_invalid_spec_tokens or {}).get(name, 0)
            assert begin <= len(tokens)
            if begin == len(tokens):
                base, chain = chains.get(name, (begin, ()))
                alive = base <= begin and tokens[base:] == [*chain[: begin - base]]
                drafted = [*(chain[begin - base :] if alive else ()), *[0] * num_drafted][:num_drafted]
                while len(found) <= num_valid and found == drafted[: len(found)]:
                    found.append(drawn(tokens + found))
            tokens += found
            self.computed[name] = min(begin + num_drafted, max(begin, len(tokens) - 1))
            sampled.append(found)
        names = list(step.num_scheduled_tokens)
        return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("kind", ["alone", *KINDS])
def test_requests_that_are_preempted_have_the_same_text(tiny_vllm: Path, kind: str, asynchronous: bool) -> None:
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.request import RequestStatus

    rng, plugin = random.Random(f"{kind} {asynchronous}"), kind != "alone"
    settings = {"async_scheduling": asynchronous, "max_model_len": 160, "max_num_batched_tokens": 64}
    scheduler = make_scheduler(tiny_vllm, RUNNING, plugin=plugin, num_blocks=22, **settings)
    source = Drafts(scheduler, VOCAB) if plugin else None
    if source is not None:
        source.begin([], kind)
    device, flying, count = Device(), deque[tuple[Any, Any]](), Counter[str]()
    wanted, texts = dict[str, list[int]](), dict[str, list[int]]()

    def validated(request: Any, drafted: list[int]) -> list[int]:
        """As by a grammar that has ended while the text goes on."""
        left = rng.randint(0, len(drafted)) if rng.random() < 0.1 else len(drafted)
        count["cut"] += len(drafted) - left
        return drafted[:left]

    def update() -> None:
        step, ran = flying.popleft()
        outputs = scheduler.update_from_output(step, ran)
        for one in [one for group in outputs.values() for one in group.outputs]:
            texts[one.request_id] += one.new_token_ids
            assert texts[one.request_id] == wanted[one.request_id][: len(texts[one.request_id])]
            if one.finish_reason is not None:
                assert len(texts[one.request_id]) == len(wanted[one.request_id])
                count["finished"] += 1

    scheduler.structured_output_manager.validate_tokens = validated
    for number in range(STEPS):
        if len(scheduler.requests) < RUNNING + 2:
            name, prompt = f"r{number}", [rng.randrange(VOCAB) for _ in range(rng.randint(1, 70))]
            wanted[name], texts[name] = continued(prompt, rng.choice((1, 3, 20, 60))), []
            if source is not None:
                source._known.append(wanted[name])
            scheduler.add_request(new_request(name, prompt, len(wanted[name])))
        if rng.random() < 0.02:
            scheduler.reset_prefix_cache(reset_running_requests=True)
            count["reset"] += 1
        if scheduler.running and rng.random() < 0.02:
            scheduler.finish_requests(rng.choice(scheduler.running).request_id, RequestStatus.FINISHED_ABORTED)
            count["aborted"] += 1
        step = scheduler.schedule()
        count["preempted"] += len(step.preempted_req_ids or ())
        for name, drafted in step.scheduled_spec_decode_tokens.items():
            # A grammar cuts what is known; rows after unknown tokens it masks when these are.
            assert any(name in one.num_scheduled_tokens for one, _ in flying) or -1 not in drafted
        if flying and rng.random() < 0.2:
            # A step that waits for a grammar.
            update()
            scheduler.update_draft_token_ids_in_output(DraftTokenIds([], []), step)
        flying.append((step, device.run(step)))
        while len(flying) > asynchronous or (flying and rng.random() < 0.1):
            update()
        if not flying:
            for request in scheduler.running:
                assert request.num_computed_tokens == device.computed[request.request_id]
                assert not request.num_output_placeholders and not request.num_in_flight_tokens
    assert count["finished"] > 200 and count["preempted"] > 100 and min(count["reset"], count["aborted"]) > 10
    if source is not None:
        assert not scheduler.num_faults and not source.miscounted and (kind == "none" or count["cut"] > 10)
        assert (source.num_accepted > 1000) == (kind in ("right", "some", "late"))


@pytest.mark.parametrize("full", [False, True])
def test_in_a_batch_so_large_that_no_row_pays_nothing_is_done_with_drafts(tiny_vllm: Path, full: bool) -> None:
    from outrider.worker.step_cost import StepCost

    scheduler, device, cost = make_scheduler(tiny_vllm, RUNNING, plugin=True), Device(), StepCost()
    source, decoding, asked = Drafts(scheduler, VOCAB), scheduler._decoding, list[str]()
    source.begin([], "right")
    for rows in [*range(100, 140)] * 5:
        # While memory bounds a step its rows are free.
        cost.took(rows=rows, tokens=rows, seconds=rows if full else 100)
    scheduler.book.price_of = lambda _: cost.price
    scheduler._decoding = lambda request: asked.append(request.request_id) or decoding(request)
    for number in range(RUNNING):
        prompt = [number % VOCAB] * 20
        source._known.append(continued(prompt, 100))
        scheduler.add_request(new_request(str(number), prompt, 100))
        found = scheduler.book.find(str(number))
        found.speculation = replace(found.speculation, weight=0.9)
    for _ in range(20):
        step = scheduler.schedule()
        scheduler.update_from_output(step, device.run(step))
    assert scheduler.book.drafted and not scheduler.num_faults
    assert bool(asked) == bool(source.num_drafted) == (not full)
