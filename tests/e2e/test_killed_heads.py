"""A worker is killed in mid-answer while a head drafts, in it or in another one: the client sees a pause, the text is
the target's, and drafts come again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from outrider.testing.tiny import tiny_checkpoint
from outrider.training.head_student import HeadLearner
from outrider.training.student import StudentConfig
from outrider_controller.cli.ask.client import SPECULATION_MODES, Gateway
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig

from benchmarks.support.asking import make_request
from tests.soak.faults import MODES, disturbed

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600), pytest.mark.slow]

_LAYERS = 6
"""EAGLE-3 reads three of them."""
_TOKENS = 600
"""The answer must last until a lease tells who serves it."""


@asynccontextmanager
async def serving(folder: Path, kind: str, lookups: str, *, remote: bool) -> AsyncIterator[tuple[Stack, Gateway]]:
    """Two targets with the head, or one and two draft workers with it."""
    model = tiny_checkpoint(folder / "model", layers=_LAYERS, max_context_len=4096, seed=4)
    head, start = folder / "head", StudentConfig(layers=tuple(range(_LAYERS)))
    # An MTP head of all layers of its target says what the target says.
    HeadLearner(kind, model, start if kind == "mtp" else StudentConfig(), None, "cpu", None).save(head, str(model), {})
    # The same bits in both targets, and little of the machine.
    engine = f"--dtype float32 --kv-cache-bytes {64 << 20}"
    config = StackConfig(
        target_model=str(model),
        draft_model=str(model),
        targets=1 if remote else 2,
        drafts=2 if remote else 0,
        target_args=f"{engine} --lookups {lookups} --{'remote-head' if remote else 'head'} {head}",
        draft_args=f"{engine} --head {head}",
        run_dir=folder / "run",
    )
    async with Stack(config) as stack, Gateway(stack.gateway_grpc) as gateway:
        yield stack, gateway


@pytest.mark.parametrize(
    ("kind", "lookups"),
    [("mtp", "''"), ("eagle3", "''"), ("medusa", "''"), ("mtp", "ngram,prediction")],
    ids=["mtp", "eagle3", "medusa", "merged"],
)
@pytest.mark.parametrize("role", ["target", "draft"])
async def test_a_worker_that_dies_under_a_head_costs_a_pause_and_no_token(
    tmp_path: Path, role: str, kind: str, lookups: str
) -> None:
    async with serving(tmp_path, kind, lookups, remote=role == "draft") as (stack, gateway):
        for mode, sampling in MODES.items():
            options = {"max_tokens": _TOKENS, "ignore_eos": True, **sampling}
            request = make_request(stack.config.model, "Tell me a story.", "off", **options)
            plain = await gateway.answer(request)
            request.options.speculation = SPECULATION_MODES["on"]
            outcome = await disturbed(stack, gateway, request, role, mode, plain)
            assert outcome.holds and outcome.tokens == _TOKENS and outcome.failovers, outcome
            again = await gateway.answer(request)
            assert again.token_ids == plain.token_ids and again.sums.num_draft_tokens > 0
            assert again.sums.num_accepted_draft_tokens > 0 or kind != "mtp"
