"""What must hold of every run, whatever befell it. Returns what does not, in words."""

from __future__ import annotations

from tests.simulation.client import FAILOVER, Answer
from tests.simulation.processes import Process
from tests.simulation.schedule import Kind, Role
from tests.simulation.witness import key_of
from tests.simulation.world import WAIT_FOR_TARGET_S, World

# Longest until a worker that is well again has its link and its lease back.
_RETURN_S = 3.0
_FOR_EVER_S = 30.0
_BREAKS = (Kind.KILL, Kind.BREAK, Kind.CUT_OFF, Kind.STALL, Kind.DRAIN, Kind.REPLAY)
# Connections that one request may lose by what befalls one process. Where a router's own network fails, it may go from
# one target to the next before it sees that both are gone.
_LOST = {Role.TARGET: 1, Role.ROUTER: 2, Role.DRAFT: 0}


def answer_problems(world: World, answer: Answer) -> list[str]:
    """What is wrong with what one client got."""
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
    """Whether what befell the workers, or what was asked for, explains this error."""
    error, plan = answer.error, answer.plan
    assert error is not None
    match error.reason:
        case "DEADLINE_EXCEEDED":
            # Nothing that befalls anyone here lasts half a minute: who waits so long, waits for ever.
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
    # The last request, which is asked when all is well again, is alone.
    needed = sum(len(plan.prompt) + plan.max_tokens for plan in schedule.requests)
    return len(schedule.requests) > places or needed > tokens


def _well(world: World, role: Role, answer: Answer, for_s: float) -> bool:
    """Whether some process of this kind was as it should be for so long before the request ended."""
    # Between two lives of one place nobody is there; whoever is there now has been well since it started.
    return any(_well_at(process, answer.ended_s) >= for_s for process in world.processes(role))


def _well_at(process: Process, at_s: float) -> float:
    return at_s - process.troubled_until_s if process.host.alive and not process.draining else 0.0


def _too_much(world: World, answer: Answer) -> bool:
    """Whether so much befell its targets that the request may be taken for the cause."""
    felt = [
        fault for at_s, fault in world.befell if answer.started_s - fault.for_s - _RETURN_S <= at_s <= answer.ended_s
    ]
    lost = sum(_LOST[fault.role] for fault in felt if fault.kind in _BREAKS)
    # One planted fault may fail several steps.
    failed = any(fault.kind is Kind.FAIL and fault.role is Role.TARGET for fault in felt)
    return failed or lost >= world.config.failover.max_lost_connections


def leftovers(world: World) -> list[str]:
    """What anyone still holds although no request is under way."""
    return [
        f"{process.host.name}: {leftover}"
        for process in world.places.values()
        if process.host.alive
        for leftover in process.leftovers()
    ]
