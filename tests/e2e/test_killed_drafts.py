"""Forty answers are under way when a worker is killed, with each kind of draft, alone and beside others: every client
reads the target's text."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from outrider.rpc.v1 import generation_pb2
from outrider.testing.tiny import tiny_checkpoint
from outrider.training.head_student import HeadLearner
from outrider.training.student import StudentConfig
from outrider_controller.cli.client import Gateway, GatewayAnswer
from outrider_controller.cli.up.ports import Ports
from outrider_controller.cli.up.process import ProcessSpec
from outrider_controller.cli.up.stack import Stack, unamended
from outrider_controller.cli.up.stack_config import StackConfig, StackPlan
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.support.asking import make_request
from tests.simulation.planted import Planted
from tests.soak.faults import MODES, killed
from tests.unit.drafters.test_other_vocabulary import checkpoint, sentencepiece

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900), pytest.mark.slow]

_LAYERS = 6
"""EAGLE-3 reads three of them."""
_TEXTS, _TOKENS = 40, 96
_BEGUN_TOKENS = 4
_BUSY = 8
"""Sequences that a worker runs when it is killed, at the least."""
_ASCII = range(3, 97)
"""Tokens that a text says as they are: a prediction of it is the answer."""
_LOOKUPS = ("ngram", "suffix", "prediction")
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Drafts:
    """What drafts, in the places of {folder} with the models below."""

    sources: tuple[str, ...]
    target: str = ""
    draft: str = ""
    """Options of the draft workers; empty: there are none."""
    lookups: tuple[str, ...] = ()

    @property
    def killed(self) -> tuple[str, ...]:
        """One worker of each role that drafts; another one lives."""
        in_target = bool(self.lookups or "--head" in self.target)
        return (*(["target-0"] if in_target else []), *(["draft-0"] if self.draft else []))


_MODEL = "--model {folder}/model"
_OTHER = "--model {folder}/other --target-model {folder}/model"
ALONE = {
    "model": Drafts(("model",), draft=_MODEL),
    **{name: Drafts((name,), lookups=(name,)) for name in _LOOKUPS},
    **{kind: Drafts((kind,), f"--head {{folder}}/{kind}") for kind in ("mtp", "eagle3", "medusa")},
    "other vocabulary": Drafts(("model",), draft=_OTHER),
    **{
        f"remote {kind}": Drafts((kind,), f"--remote-head {{folder}}/{kind}", f"{_MODEL} --head {{folder}}/{kind}")
        for kind in ("mtp", "eagle3", "medusa")
    },
}
_PAIRS = {
    "model and mtp": ("model", "mtp"),
    "other vocabulary and eagle3": ("other vocabulary", "eagle3"),
    "model and medusa": ("model", "medusa"),
    "remote mtp": ("remote mtp",),
}
MERGED = {
    f"lookups, {name}": Drafts(
        tuple(source for kind in kinds for source in ALONE[kind].sources) + _LOOKUPS,
        next((ALONE[kind].target for kind in kinds if ALONE[kind].target), ""),
        ALONE[kinds[0]].draft,
        _LOOKUPS,
    )
    for name, kinds in _PAIRS.items()
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a head of each kind for it, and a model with other tokens."""
    made = tmp_path_factory.mktemp("models")
    model = tiny_checkpoint(made / "model", layers=_LAYERS, max_context_len=1024, seed=4)
    for kind in ("mtp", "eagle3", "medusa"):
        # An MTP head of all layers of its target says what the target says.
        start = StudentConfig(layers=tuple(range(_LAYERS))) if kind == "mtp" else StudentConfig()
        HeadLearner(kind, model, start, None, "cpu", None).save(made / kind, str(model), {})
    checkpoint(made / "other", sentencepiece(), seed=1)
    return made


def planted(fault: Planted, plan: StackPlan, ports: Ports) -> StackPlan:
    """The targets have this fault."""

    def changed(spec: ProcessSpec) -> ProcessSpec:
        python, flag, _, *flags = spec.argv
        path = os.pathsep.join([str(_ROOT), *filter(None, sys.path)])
        argv = (python, flag, "tests.soak.planted_target", fault.name, *flags)
        return replace(spec, argv=argv, env={**spec.env, "PYTHONPATH": path})

    return replace(plan, targets=tuple(map(changed, plan.targets)))


def stack_of(drafts: Drafts, folder: Path, run_dir: Path, fault: Planted | None = None) -> Stack:
    # The same bits in both targets, and little of the machine.
    engine = f"--dtype float32 --kv-cache-bytes {64 << 20} --max-sequences {3 * _TEXTS}"
    words = shlex.split(drafts.draft.format(folder=folder))
    config = StackConfig(
        target_model=str(folder / "model"),
        draft_model=words[1] if words else "",
        targets=2 if "target-0" in drafts.killed else 1,
        drafts=2 if words else 0,
        target_args=f"{engine} --lookups '{','.join(drafts.lookups)}' {drafts.target.format(folder=folder)}",
        draft_args=f"{engine} {shlex.join(words[2:])}",
        run_dir=run_dir,
    )
    return Stack(config, amend=partial(planted, fault) if fault else unamended)


async def answers(
    stack: Stack, more: dict[str, Any], before: list[GatewayAnswer] | None = None, kill: Sequence[str] = ()
) -> list[GatewayAnswer]:
    """To forty prompts in each mode, all at once. `before`: the plain answers; without them nothing is drafted. `kill`:
    each of these processes once it is busy."""
    asked = [(f"Tell me story {number}.", options) for options in MODES.values() for number in range(_TEXTS)]
    lengths = [0] * len(asked)

    async def answer(number: int) -> GatewayAnswer:
        prompt, options = asked[number]
        expected = {"prediction": before[number].text} if before and "allowed_token_ids" in more else {}
        given = {"max_tokens": _TOKENS, "ignore_eos": True, "max_draft_tokens": 4, **options, **more, **expected}
        request = make_request(stack.config.model, prompt, "on" if before else "off", **given)
        return await gateway.answer(request, on_chunk=partial(arrived, number))

    def arrived(number: int, chunk: generation_pb2.StreamGenerateResponse) -> None:
        lengths[number] += len(chunk.token_ids)

    def killed_at_work() -> None:
        alive = {name: generated(metrics(stack, name)) for name in kill}
        while alive:
            assert sum(lengths) < len(asked) * _TOKENS, f"never busy: {alive}"
            for name, before in [*alive.items()]:
                if is_busy(metrics(stack, name), before):
                    killed(stack, name)
                    del alive[name]

    async with Gateway(stack.gateway_grpc) as gateway:
        # From a thread: the event loop reads what the workers said a while ago.
        *answered, _ = await asyncio.gather(*map(answer, range(len(asked))), asyncio.to_thread(killed_at_work))
    return answered


def metrics(stack: Stack, worker: str) -> list[Sample]:
    with urlopen(f"http://{stack.ops[worker]}/metrics") as page:
        families = text_string_to_metric_families(page.read().decode())
    return [sample for family in families for sample in family.samples]


def is_busy(found: list[Sample], before: float | None) -> bool:
    """It runs sequences, and a target has committed tokens of as many since it had generated as many as `before`."""
    [running] = [sample.value for sample in found if sample.name.endswith("_num_requests_running")]
    begun = before is None or (generated(found) or 0) - before >= _BUSY * _BEGUN_TOKENS
    return running >= _BUSY and begun


def generated(found: list[Sample]) -> float | None:
    """Tokens; None of a draft worker."""
    return next((sample.value for sample in found if sample.name == "outrider_generation_tokens_total"), None)


def drafted_by(stack: Stack) -> set[str]:
    """What has drafted for the target that was not killed."""
    last = f"target-{stack.config.targets - 1}"
    name = "outrider_source_drafted_tokens_total"
    return {sample.labels["source"] for sample in metrics(stack, last) if sample.name == name and sample.value}


def token_ids(answered: list[GatewayAnswer]) -> list[list[int]]:
    return [answer.token_ids for answer in answered]


@pytest.mark.parametrize("drafts", [pytest.param(drafts, id=name) for name, drafts in (ALONE | MERGED).items()])
async def test_forty_texts_are_the_target_s_though_a_worker_is_killed_in_mid_answer(
    folder: Path, tmp_path: Path, drafts: Drafts
) -> None:
    more = {"allowed_token_ids": _ASCII} if "prediction" in drafts.sources else {}
    async with stack_of(drafts, folder, tmp_path) as stack:
        plain = await answers(stack, more)
        assert {len(ids) for ids in token_ids(plain)} == {_TOKENS}
        disturbed = await answers(stack, more, plain, drafts.killed)
        assert token_ids(disturbed) == token_ids(plain)
        moved = [answer.sums for answer in disturbed]
        assert any(each.num_target_failovers for each in moved) is ("target-0" in drafts.killed)
        assert any(each.num_draft_failovers for each in moved) is ("draft-0" in drafts.killed)
        assert drafted_by(stack) == set(drafts.sources)


@pytest.mark.parametrize(
    ("name", "fault"), [("mtp", Planted.COMMITTED_CHANGED), ("remote mtp", Planted.UNVERIFIED)], ids=["target", "draft"]
)
async def test_and_a_planted_fault_is_found(folder: Path, tmp_path: Path, name: str, fault: Planted) -> None:
    drafts = ALONE[name]
    async with stack_of(drafts, folder, tmp_path, fault) as stack:
        plain = await answers(stack, {})
        assert token_ids(await answers(stack, {}, plain, drafts.killed)) != token_ids(plain)
