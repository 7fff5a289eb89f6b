"""What steps launch has been launched at the start: nothing is compiled while a worker serves.

Kernels are noted and not run. Two launches need two compilations where their constants differ, their types, or which
of their numbers and addresses are multiples of 16, unless the kernel says that this does not matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.engine import HEAD_INPUT, Engine, EngineConfig, Row
from outrider.engine.loading.loader import load_engine
from outrider.heads.engine import head_engine
from outrider.heads.runner import HeadRunner
from outrider.sequence.spec import SequenceSpec
from outrider.speculation import (
    Q_TOTAL,
    Candidate,
    DraftDistribution,
    LogitsOptions,
    LogitsProcessor,
    SamplingParams,
    VerificationMode,
)
from outrider.speculation.batched import verify_batched
from outrider.speculation.proposals import propose_batched
from outrider.tree import DraftTree

from tests.unit.engine.run.test_graphs import NUM_BLOCKS, Unrecorded, recorded
from tests.unit.heads.test_engine import made

pytestmark = pytest.mark.usefixtures("interpreted")

GREEDY = SamplingParams(temperature=0)
PLAIN, CUT = SamplingParams(temperature=0.7, seed=1), SamplingParams(temperature=1.2, top_k=5, top_p=0.9, seed=2)
MODES = [(GREEDY, VerificationMode.GREEDY), *((p, mode) for p in (PLAIN, CUT) for mode in VerificationMode)]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    from triton.runtime.interpreter import InterpretedFunction

    found = set[Any]()
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda self, *args, grid, warmup, **options: found.add(_key(self, args, options))
    )
    # Nothing is written to them.
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    return found


def _key(kernel: Any, values: tuple[Any, ...], options: dict[str, Any]) -> Any:
    anything = kernel.kwargs.get("do_not_specialize") or ()
    any_address = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
    arguments = []
    for name, value in zip(kernel.arg_names, values, strict=False):
        if isinstance(value, torch.Tensor):
            arguments.append((value.dtype, name in any_address or value.data_ptr() % 16 == 0))
        elif isinstance(value, int) and name not in anything:
            arguments.append((value == 1, value % 16 == 0))
    return kernel.fn.__name__, tuple(arguments), tuple(sorted(options.items()))


def made_engine(tiny: Path, *, graphs: bool) -> Engine:
    config = EngineConfig(
        num_blocks=NUM_BLOCKS + 1, block_size=8, max_context_len=128, attention="triton", execution="fused"
    )
    engine = load_engine(tiny, config)
    assert engine.info.execution == "fused-cuda-invariant"
    engine.kv._pool.allocate(NUM_BLOCKS + 1)
    engine.kv._pool.release(list(range(NUM_BLOCKS)))
    if graphs:
        engine._graphs = recorded(engine)
        engine._graphs.capture_all()
    return engine


def serve(engine: Engine) -> None:
    layers = (1, HEAD_INPUT)
    for count in (1, 3, 16, 40, 64, 65, 100):
        sequence, others = engine.kv.open([]), [engine.kv.open([]) for _ in range(2)]
        engine.forward([Row(sequence, [5] * count, 1 + count // 2)])
        engine.forward([Row(sequence, [5, 6, 7, 8], 4, parents=[-1, 0, 0])])
        engine.forward_tapped([*(Row(each, [4] * 3, 1, num_tapped=2) for each in others)], layers)
        long = engine.kv.open([])
        engine.forward_tapped([Row(long, [5] * 66, 1, num_tapped=3), Row(others[0], [4] * 3, 3)], layers)
        for each in (sequence, long, *others):
            engine.kv.close(each)


def verdicts(width: int) -> None:
    processor = LogitsProcessor(LogitsOptions(repetition_penalty=1.2, logit_bias=((5, 1.0),)), [3, 4, 5])
    for params, mode in MODES:
        for drafted in (0, 3):
            q = (DraftDistribution((7,), (Q_TOTAL,)),) * drafted if mode is VerificationMode.RATIO else ()
            draft = DraftTree(4, (7,) * drafted, q=q)
            more = [Candidate(params, mode, draft, processor, 3), Candidate(GREEDY, VerificationMode.GREEDY)]
            verify_batched(torch.zeros(drafted + 2, width), more)
            verify_batched(torch.zeros(drafted + 1, width), more[:1])


@pytest.mark.parametrize("graphs", [True, False], ids=["recorded", "eager"])
def test_what_steps_of_a_target_launch_has_been_launched_at_the_start(
    tiny: Path, launched: set[Any], graphs: bool
) -> None:
    engine = made_engine(tiny, graphs=graphs)
    engine.warm_up()
    engine.record_taps((1, HEAD_INPUT))
    known, captured = {*launched}, len(engine._graphs._graphs) if engine._graphs else 0
    assert {"attend_kernel", "product_kernel", "choose_kernel"} <= {name for name, *_ in known}
    serve(engine)
    verdicts(engine.info.vocab_size)
    assert launched - known == set()
    assert captured == (len(engine._graphs._graphs) if engine._graphs else 0)


@pytest.mark.parametrize("graphs", [True, False], ids=["recorded", "eager"])
@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_what_a_head_launches_has_been_launched_at_the_start(
    tiny: Path, launched: set[Any], kind: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("engine", "runner"):
        monkeypatch.setattr(f"outrider.heads.{module}.propose", propose_batched)
    head: Any = made(kind, tiny).bfloat16()
    config = EngineConfig(num_blocks=65, attention="triton", execution="transformers", prefix_cache=False)
    engine = head_engine(head, config, 512)
    assert engine is not None and engine.info.execution == "fused-cuda-invariant"
    if graphs:
        engine.record(head, Unrecorded(), 64 * config.block_size)
    engine.warm_up()
    known = {*launched}
    assert {"attend_kernel", "product_kernel", "guess_kernel"} <= {name for name, *_ in known}
    runner = HeadRunner(head, engine)
    for params, mode in MODES:
        for length in (2, 7, 30, 200):
            tokens = [5] * length
            spec = SequenceSpec(tuple(tokens), params, mode, 32)
            texts = [runner.open(spec, tokens) for _ in range(2)]
            for text in texts:
                runner.see(text, 0, torch.zeros(length - 1, 64).bfloat16())
            with torch.inference_mode():
                runner.read(texts)
                for count in (1, 4, 9):
                    runner.draft(texts, [count, 1])
            for text in texts:
                runner.close(text)
    assert launched - known == set()
