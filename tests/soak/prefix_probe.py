"""python -m tests.soak prefix-probe: does a tenant learn from a prefix cache what another one has asked?

Tenant A asks with a prompt that nobody has asked before. Tenant B then asks with the same prompt, and with another that
is new, one of them first by chance. If B's two differ in cached tokens, or in the times of their first tokens or
whole answers, B can tell what A asks. That the probe could see it is shown by A, which asks with its own prompt again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import click
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider_controller.cli.exits import ExitCode
from scipy import stats

from tests.route_call import RouteCall
from tests.soak.soak import Stay, staying

_PROMPT_TOKENS, _ANSWER_TOKENS = 256, 4
_NUM_BLOCKS = 256
_TIMEOUT_S = 60.0
_MIN_P = 0.01
_PRIMED, _NEW, _OWN = "primed by A", "new", "A's own again"


@dataclass(slots=True)
class Probed:
    """By what was asked for, one entry per request."""

    cached_tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    first_token_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    answer_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def problems(self) -> list[str]:
        found = []
        for kind in (_PRIMED, _NEW):
            if shared := sum(count > 0 for count in self.cached_tokens[kind]):
                found.append(f"{shared} prompts of B that were {kind} had cached tokens")
        for what, times in (("first tokens", self.first_token_s), ("answers", self.answer_s)):
            if (p := difference(times[_PRIMED], times[_NEW])) <= _MIN_P:
                found.append(f"B's {what} differ: p = {p:.4f}")
        if (
            min(self.cached_tokens[_OWN]) == 0
            or difference(self.first_token_s[_OWN], self.first_token_s[_NEW]) > _MIN_P
        ):
            found.append("a cached prompt looks like a new one: the probe would see nothing")
        return found


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """The chance of so different samples of one distribution (Kolmogorov and Smirnov, two samples)."""
    return float(stats.ks_2samp(one, other).pvalue)


@click.command("prefix-probe")
@click.option("-n", "--num-probes", type=click.IntRange(20), default=1000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def prefix_probe(num_probes: int, seed: int) -> int:
    """A router, a target and a draft with a tiny model, on loopback: can one tenant see another's cached prefixes?"""
    probed = asyncio.run(probe(num_probes, seed))
    for kind, cached in probed.cached_tokens.items():
        ordered = sorted(probed.first_token_s[kind])
        median_ms = 1e3 * ordered[len(ordered) // 2]
        click.echo(f"{kind}: {sum(cached) / len(cached):.1f} cached tokens, first token {median_ms:.2f} ms (median)")
    for what, times in (("first tokens", probed.first_token_s), ("answers", probed.answer_s)):
        click.echo(f"{what}, {_PRIMED} against {_NEW}: KS p = {difference(times[_PRIMED], times[_NEW]):.3f}")
    found = probed.problems()
    click.echo("\n".join(found) or f"{num_probes} probes: nothing to be seen")
    return ExitCode.ERROR if found else ExitCode.OK


async def probe(num_probes: int, seed: int) -> Probed:
    probed, rng = Probed(), random.Random(seed)
    async with staying(_NUM_BLOCKS) as stay:
        # The first requests of a process pay for what is made once.
        for _ in range(10):
            await _ask(stay, "warm-up", _prompt(rng))
        for _ in range(num_probes):
            primed = _prompt(rng)
            await _ask(stay, "a", primed)
            asked = [("b", _PRIMED, primed), ("b", _NEW, _prompt(rng)), ("a", _OWN, primed)]
            rng.shuffle(asked)
            for tenant, kind, prompt in asked:
                cached_tokens, first_s, answer_s = await _ask(stay, tenant, prompt)
                probed.cached_tokens[kind].append(cached_tokens)
                probed.first_token_s[kind].append(first_s)
                probed.answer_s[kind].append(answer_s)
    return probed


def _prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(3, 259) for _ in range(_PROMPT_TOKENS)]


async def _ask(stay: Stay, tenant: str, prompt: Sequence[int]) -> tuple[int, float, float]:
    """Cached tokens, seconds to the first token, and to the end."""
    request = router.RouteRequest(
        request_id="probe",
        tenant=tenant,
        model="tiny",
        prompt_token_ids=prompt,
        sampling=sequence.Sampling(temperature=0, top_p=1),
        stopping=sequence.Stopping(max_new_tokens=_ANSWER_TOKENS),
        speculation=router.SPECULATION_MODE_ON,
    )
    started_s = time.perf_counter()
    first_s, cached = None, 0
    async for response in RouteCall(stay.stub, request, _TIMEOUT_S):
        if first_s is None and response.token_ids:
            first_s, cached = time.perf_counter() - started_s, response.num_cached_tokens
    assert first_s is not None
    return cached, first_s, time.perf_counter() - started_s
