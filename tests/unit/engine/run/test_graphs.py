"""What a graph records, run unrecorded: padding, packing and the fixed inputs change nothing of what a step says."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from outrider.engine import HEAD_INPUT, Engine, EngineConfig, EngineSequence, Row
from outrider.engine.attention.paged import TritonAttention
from outrider.engine.loading.loader import load_engine
from outrider.engine.run.buckets import Bucket, make_buckets
from outrider.engine.run.graphs import GraphRecorder, GraphRunner, GraphShape, Recorded
from torch import Tensor

pytestmark = pytest.mark.usefixtures("interpreted")

NUM_BLOCKS, BLOCK_SIZE = 24, 8
CONTEXT = 128


class Unrecorded(GraphRecorder):
    """Replays by running again: everything of a graph but the recording, which needs a GPU."""

    def __init__(self) -> None:
        pass

    def record(self, run: Callable[[], None]) -> Recorded:
        # As before a recording, in a run that makes what the graphs share.
        run()
        return SimpleNamespace(replay=run)


@pytest.fixture(params=["fused", pytest.param("transformers", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest, tiny: Path) -> Engine:
    config = EngineConfig(
        dtype="float32",
        num_blocks=NUM_BLOCKS + 1,
        block_size=BLOCK_SIZE,
        max_context_len=CONTEXT,
        attention="triton",
        execution=request.param,
        prefix_cache=False,
    )
    engine = load_engine(tiny, config)
    # The last block is the scratch block here.
    engine.kv._pool.allocate(NUM_BLOCKS + 1)
    engine.kv._pool.release(list(range(NUM_BLOCKS)))
    return engine


def recorded(engine: Engine) -> GraphRunner:
    shape = GraphShape(make_buckets(4, 32), engine.info.vocab_size, CONTEXT // BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE)
    attention, device = engine._attention, torch.device("cpu")
    assert isinstance(attention, TritonAttention)
    return GraphRunner(engine._decoder, attention, engine._cache, shape, device, Unrecorded())


def play(engine: Engine) -> tuple[list[Tensor], list[EngineSequence]]:
    """A prefill, then steps of ragged rows, some of whose tokens are taken back."""
    rng = random.Random(1)
    sequences = [engine.kv.open([]) for _ in range(3)]
    out = [engine.forward([Row(s, [rng.randrange(300) for _ in range(5 + 7 * n)], 1) for n, s in enumerate(sequences)])]
    for step in range(6):
        rows = []
        for sequence in sequences[: 1 + step % 3]:
            count = rng.randint(1, 6)
            rows.append(Row(sequence, [rng.randrange(300) for _ in range(count)], rng.randint(1, count)))
        out.append(engine.forward(rows).clone())
        for row in rows:
            engine.kv.rewind(row.sequence, row.sequence.cached_len - rng.randrange(len(row.token_ids)))
    return out, sequences


@pytest.mark.slow
def test_recorded_steps_say_what_eager_ones_say(engine: Engine) -> None:
    eager, sequences = play(engine)
    for sequence in sequences:
        engine.kv.close(sequence)
    engine._graphs = recorded(engine)
    got, _ = play(engine)
    assert len(engine._graphs._graphs) > 1
    for now, before in zip(got, eager, strict=True):
        assert now.shape == before.shape
        assert (now - before).abs().max() <= 2e-6 * before.abs().max()


def test_padding_is_written_to_nobodys_block(engine: Engine) -> None:
    sequence = engine.kv.open([])
    engine.forward([Row(sequence, list(range(20)), 1)])
    before = [keys.clone() for keys in engine._cache.keys]
    engine._graphs = recorded(engine)
    engine.forward([Row(sequence, [7, 8], 1)])
    mine = {sequence.blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in (20, 21)}
    for keys, old in zip(engine._cache.keys, before, strict=True):
        changed = set(torch.nonzero((keys != old).any(-1).any(0))[:, 0].tolist())
        assert changed == mine | {NUM_BLOCKS * BLOCK_SIZE}


@pytest.mark.slow
def test_a_recorded_tree_says_what_chains_say(engine: Engine) -> None:
    """Its logits and hidden states. The nodes that are kept go on as a chain. Another row shares the step."""
    text, nodes, parents, layers = [5, 6, 7, 8, 9], [7, 8, 9, 10, 11], [-1, -1, 1, 0, 2], (1, HEAD_INPUT)
    sequence, other = engine.kv.open([]), engine.kv.open([])
    engine.forward([Row(sequence, text[:-1], 0), Row(other, text[:-1], 0)])
    engine._graphs = recorded(engine)
    rows = [Row(other, [text[-1], 3], 2), Row(sequence, [text[-1], *nodes], 6, num_tapped=6, parents=parents)]
    logits, states = (found.clone() for found in engine.forward_tapped(rows, layers))
    engine.kv.keep(sequence, [1, 2, 4])
    after = engine.forward([Row(sequence, [5], 1)]).clone()
    assert set(engine._graphs._graphs) == {(Bucket(16, 2), layers), (Bucket(16, 1), ())}
    engine._graphs = None
    for chain, at in (([8, 9, 11, 5], [0, 2, 3, 5]), ([7, 10], [0, 1, 4])):
        whole = Row(engine.kv.open([]), [*text, *chain], len(chain) + 1, num_tapped=len(chain) + 1)
        want, want_states = engine.forward_tapped([whole], layers)
        torch.testing.assert_close(logits[2:][at], want[: len(at)])
        torch.testing.assert_close(states[at], want_states[: len(at)])
        if chain[-1] == 5:
            torch.testing.assert_close(after, want[-1:])


@pytest.mark.slow
def test_a_chunk_of_prefill_runs_unrecorded(engine: Engine) -> None:
    engine._graphs = recorded(engine)
    engine.forward([Row(engine.kv.open([]), list(range(33)), 1)])
    assert not engine._graphs._graphs
