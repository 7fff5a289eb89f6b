"""A target on vLLM behind a router and a gateway, in this process: receipts, and what an operator says of a tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from outrider.gateway.config import GatewayConfig
from outrider.gateway.server import RunningGateway
from outrider.gateway.server import running as running_gateway
from outrider.protocol.receipts import checked
from outrider.rpc.v1 import control_pb2, receipt_pb2
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider.testing.tiny import tiny_checkpoint
from outrider_controller.router.config import FailoverConfig

from tests.integration.router.conftest import Fleet, control_plane, fleet, metadata_url
from tests.integration.router.test_plan import OFF, ON
from tests.integration.router.test_receipts import KEY, MODES, answered, ask, digest_of, verified
from tests.integration.target.test_server import until
from tests.vllm.served import Loaded, loaded, running

__all__ = ["fleet", "metadata_url"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

# So likely that the text repeats it, which is looked up.
REPEATING: dict[str, Any] = {"logit_bias": {40: 30.0}, "ignore_eos": True}
WAYS = {**MODES, "repeats": {"temperature": 0, **REPEATING}, "repeats, sampled": {"temperature": 0.8, **REPEATING}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """With room for a text that does not end while somebody speaks."""
    model = tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", head_dim=32, max_context_len=1 << 14)
    with loaded(model) as made:
        yield made


@pytest.fixture
async def stack(engine: Loaded, fleet: Fleet) -> Fleet:
    """Its target looks drafts up."""
    worker, _ = await fleet.stack.enter_async_context(running(engine))
    fleet.targets.append(worker.servicer)
    lease = fleet.store.register(engine.info, worker.life.address, worker.servicer.load_message)
    await fleet.stack.enter_async_context(lease)
    fleet.num_workers += 1
    # That of the other tests finds a target stalled which shares its cores with the test.
    await fleet.start(failover=FailoverConfig())
    return fleet


@pytest.fixture
async def gateway(stack: Fleet) -> AsyncIterator[RunningGateway]:
    assert stack.router is not None
    config = GatewayConfig(
        listen_grpc="127.0.0.1:0", listen_http="127.0.0.1:0", routers=(stack.router.address,), receipt_key=KEY
    )
    async with running_gateway(config) as started:
        yield started


@pytest.mark.parametrize("way", WAYS)
async def test_a_receipt_names_the_targets_revision_and_the_answer_is_said_again(
    engine: Loaded, stack: Fleet, gateway: RunningGateway, way: str
) -> None:
    prompt, address = [40, 41, 42, 40, 41], gateway.grpc_address
    answer = await answered(stack, address, ask(prompt, **WAYS[way]))
    signed = checked(answer.receipt, KEY.private.public_key())
    assert list(signed.model_revisions) == [engine.info.model_revision]
    assert (signed.prompt_sha256, signed.output_sha256) == (digest_of(prompt), digest_of(answer.token_ids))
    if way.startswith("repeats"):
        assert list(signed.draft_kinds) == ["ngram"]
    assert (await verified(address, answer.receipt, prompt, answer.token_ids)).startswith("equal: ")


async def test_a_changed_token_is_found_and_another_revision_refused(
    engine: Loaded, stack: Fleet, gateway: RunningGateway
) -> None:
    prompt, address = [40, 41, 42, 40, 41], gateway.grpc_address
    answer = await answered(stack, address, ask(prompt, temperature=0.8, ignore_eos=True))
    output = list(answer.token_ids)
    output[17] = (output[17] + 1) % 384
    assert (await verified(address, answer.receipt, prompt, output)).startswith("not equal: token 17 ")
    other = receipt_pb2.Receipt()
    other.CopyFrom(checked(answer.receipt, KEY.private.public_key()))
    # That of the same weights on another engine.
    del other.model_revisions[:]
    other.model_revisions.append(engine.info.model_revision.partition("/")[0] + "/float32")
    said = await verified(address, KEY.sign(other), prompt, answer.token_ids)
    assert f"there is only {engine.info.model_revision}" in said


async def test_what_an_operator_says_holds_for_a_running_request(stack: Fleet) -> None:
    """Drafts, none, at most two, as each round says."""
    assert stack.router is not None
    policy = stack.router.dispatcher.policy
    logits = sp.LogitsOptions(repetition_penalty=1, bias_token_ids=[40], biases=[30])
    call = stack.call(stack.request(max_new_tokens=16_000, model="tiny", logits=logits), timeout=None)

    async def rounds(count: int) -> list[int]:
        """Drafted tokens of the next ones."""
        return [(await call.read()).num_drafted for _ in range(count)]

    async def until_rounds_have(low: int, high: int) -> None:
        for _ in range(200):
            found = await rounds(5)
            if low <= max(found) <= high:
                return
        raise AssertionError(f"drafted tokens of the last rounds: {found}")

    async with control_plane(stack) as control:
        await until(lambda: policy.led)
        say = control_pb2.SetSpeculationRequest
        await control.SetSpeculation(say(tenant="t", setting=ON))
        await until_rounds_have(3, 32)
        await control.SetSpeculation(say(tenant="t", setting=OFF))
        await until_rounds_have(0, 0)
        assert not any(await rounds(30))
        await control.SetSpeculation(say(tenant="t", setting=ON, max_draft_tokens=2))
        await until_rounds_have(1, 2)
        assert max(await rounds(20)) == 2
    call.cancel()
