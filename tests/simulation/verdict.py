"""The conditions that every run must meet, with any faults. Returns the violations as text."""

from __future__ import annotations

from tests.simulation.client import FAILOVER, Answer
from tests.simulation.processes import Process
from tests.simulation.schedule import Kind, Role
from tests.simulation.witness import key_of
from tests.simulation.world import WAIT_FOR_TARGET_S, World

# Longest time until a recovered worker has its link and its lease again.
_RETURN_S = 3.0
_FOR_EVER_S = 30.0
_BREAKS = (Kind.KILL, Kind.BREAK, Kind.CUT_OFF, Kind.STALL, Kind.DRAIN, Kind.REPLAY)
# Connections that one request may lose through one fault. When a router's own network fails, a request may move from
# one target to the next before the router notices that both are unreachable.
_LOST = {Role.TARGET: 1, Role.ROUTER: 2, Role.DRAFT: 0}


def answer_problems(world: World, answer: Answer) -> list[str]:
    """The violations in one client's answer."""
    plan = answer.plan
    whole, finish = _right_answer(world, answer)
    problems = []
    if answer.token_ids != whole[: len(answer.token_ids)]:
        problems.append(f"got {answer.token_ids}, the target says {whole}")
    if answer.error is not None:
        if not _excused(world, answer):
            problems.append(f"failed without a cause: {answer.error.reason}: {answer.error}")
    elif answer.cancelled:
        if plan.cancel_after_s is None and plan.cancel_after_tokens is None:
            problems.append("was cancelled, and nobody had asked for that")
    elif answer.finish is None:
        problems.append("ended without a finish reason")
    elif (answer.token_ids, answer.finish) != (whole, finish):
        problems.append(
            f"finished ({answer.finish}) after {len(answer.token_ids)} tokens; right: {finish}, {len(whole)}"
        )
    return [f"request {plan.number} {problem}" for problem in problems]


def _right_answer(world: World, answer: Answer) -> tuple[list[int], str]:
    plan = answer.plan
    text = world.texts.text(key_of(plan), plan.max_tokens) or []
    for count, token in enumerate(text, start=1):
        if token in plan.stop_token_ids:
            return text[:count], "stop"
    return text, "length"


def _excused(world: World, answer: Answer) -> bool:
    """Whether the faults, or the request itself, explain this error."""
    error, plan = answer.error, answer.plan
    assert error is not None
    match error.reason:
        case "DEADLINE_EXCEEDED":
            # No fault lasts half a minute: a request that waits so long would wait forever.
            return answer.ended_s - answer.started_s >= plan.timeout_s - 0.01 and plan.timeout_s < _FOR_EVER_S
        case "OVERLOADED" | "QUEUE_TIMEOUT":
            return not answer.token_ids and _may_be_full(world)
        case "NO_TARGET":
            return not _well(world, Role.TARGET, answer, WAIT_FOR_TARGET_S + _RETURN_S)
        case "TARGETS_FAILED":
            return _too_much(world, answer)
        case "ROUTERS_FAILED":
            for_s = FAILOVER.window_s + _RETURN_S
            return not (_well(world, Role.ROUTER, answer, for_s) and _well(world, Role.TARGET, answer, for_s))
    return False


def _may_be_full(world: World) -> bool:
    schedule = world.schedule
    places = min(plan.max_sequences for plan in schedule.targets)
    tokens = min(plan.num_blocks for plan in schedule.targets) * schedule.block_size
    # Without the last request, which is sent alone after all faults.
    needed = sum(len(plan.prompt) + plan.max_tokens for plan in schedule.requests)
    return len(schedule.requests) > places or needed > tokens


def _well(world: World, role: Role, answer: Answer, for_s: float) -> bool:
    """Whether some process of this role was well for `for_s` before the request ended."""
    # A place is empty between two processes; the present one has been well since it started.
    return any(_well_at(process, answer.ended_s) >= for_s for process in world.processes(role))


def _well_at(process: Process, at_s: float) -> float:
    return at_s - process.troubled_until_s if process.host.alive and not process.draining else 0.0


def _too_much(world: World, answer: Answer) -> bool:
    """Whether so many faults hit its targets that the router may take the request for the cause."""
    felt = [
        fault for at_s, fault in world.befell if answer.started_s - fault.for_s - _RETURN_S <= at_s <= answer.ended_s
    ]
    lost = sum(_LOST[fault.role] for fault in felt if fault.kind in _BREAKS)
    # One planted fault may fail several steps.
    failed = any(fault.kind is Kind.FAIL and fault.role is Role.TARGET for fault in felt)
    return failed or lost >= world.config.failover.max_lost_connections


def leftovers(world: World) -> list[str]:
    """Resources that any process still holds although no request runs."""
    return [
        f"{process.host.name}: {leftover}"
        for process in world.places.values()
        if process.host.alive
        for leftover in process.leftovers()
    ]
