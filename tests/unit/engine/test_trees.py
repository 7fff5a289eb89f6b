"""Drafted trees: a node has the bits of the same token in a chain, and nodes that are kept go on as a chain."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from outrider.engine import MAX_TREE_NODES, Engine, EngineConfig, EngineSequence, OutOfBlocks, Row
from outrider.engine.kv.kv_cache_manager import KVCacheManager
from outrider.engine.loading.loader import load_engine
from outrider.testing.tiny import tiny_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.unit.engine.test_supported_models import made
from tests.unit.engine.variants import skip_what_cannot_run, slow_but_the_best

VOCAB = range(3, 300)
CONTEXT = 256


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), max_context_len=CONTEXT)


@pytest.fixture(
    scope="module",
    params=[
        "fused bfloat16",
        pytest.param("fused float32", marks=pytest.mark.slow),
        # In float32 too.
        "fused windowed",
        *slow_but_the_best(sizes=(16, 64)),
    ],
)
def engine(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    execution, how = request.param.split()
    skip_what_cannot_run(execution)
    if how == "windowed":
        checkpoint, how = made("mistral", {"sliding_window": 5}, tmp_path_factory.mktemp("windowed")), "float32"
    if execution == "fused":
        return load_engine(checkpoint, EngineConfig(dtype=how, execution=execution, block_size=16, num_blocks=96))
    config = EngineConfig(execution="native", native_variant=execution, block_size=int(how), num_blocks=96)
    return load_engine(checkpoint, config)


@dataclass(frozen=True)
class Tree:
    token_ids: list[int]
    parents: list[int]

    @classmethod
    def drawn(cls, rng: random.Random, count: int) -> Tree:
        """Any shape, in any order in which parents come first; half of the nodes continue the one before them."""
        parents = [node - 1 if rng.random() < 0.5 else rng.randint(-1, node - 1) for node in range(count)]
        return cls([rng.choice(VOCAB) for _ in parents], parents)

    def path(self, node: int) -> list[int]:
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def deepest(self) -> list[int]:
        return max(map(self.path, range(len(self.parents))), key=len)

    def tokens(self, path: Sequence[int]) -> list[int]:
        return [self.token_ids[node] for node in path]


def opened(engine: Engine, text: list[int], chunk: int = 50) -> EngineSequence:
    """A sequence with all of the text but its last token in the cache."""
    sequence = engine.kv.open(text, salt=b"tree")
    while sequence.cached_len < len(text) - 1:
        engine.forward([Row(sequence, text[sequence.cached_len : -1][:chunk], 0)])
    return sequence


def plainly(engine: Engine, text: list[int], start: int) -> Tensor:
    """Logits of the tokens from `start` on, each decoded alone."""
    sequence = engine.kv.open([])
    engine.forward([Row(sequence, text[:start], 0)])
    found = [engine.forward([Row(sequence, [token], 1)]).clone() for token in text[start:]]
    engine.kv.close(sequence)
    return torch.cat(found)


def as_chains(engine: Engine, text: list[int], tree: Tree) -> Tensor:
    """Logits of the text's last token and of each node, plainly decoded."""
    last = len(text) - 1
    found = [plainly(engine, text, last)]
    for node in range(len(tree.parents)):
        found.append(plainly(engine, [*text, *tree.tokens(tree.path(node))], last)[-1:])
    return torch.cat(found)


def row(sequence: EngineSequence, text: list[int], tree: Tree) -> Row:
    tokens = [*text[sequence.cached_len :], *tree.token_ids]
    return Row(sequence, tokens, len(tree.parents) + 1, parents=tree.parents)


@pytest.mark.parametrize("length", [15, 40, 64, 130])
def test_a_node_has_the_bits_of_the_same_token_in_a_chain(engine: Engine, length: int) -> None:
    rng = random.Random(length)
    text, tree = [rng.choice(VOCAB) for _ in range(length)], Tree.drawn(rng, 14)
    assert len(tree.deepest()) >= 3
    sequence = opened(engine, text)
    assert torch.equal(engine.forward([row(sequence, text, tree)]), as_chains(engine, text, tree))
    assert sequence.tokens == text
    engine.kv.close(sequence)


def test_trees_beside_chunks_and_other_trees_have_these_bits_too(engine: Engine) -> None:
    rng = random.Random(7)
    texts = [[rng.choice(VOCAB) for _ in range(length)] for length in (33, 79, 20)]
    trees = [Tree.drawn(rng, count) for count in (9, 21, 1)]
    sequences = [opened(engine, text) for text in texts]
    # The second has not read all of its text yet: its chunk and its tree are one row.
    engine.kv.rewind(sequences[1], 30)
    chunk, plain = engine.kv.open([]), opened(engine, texts[0])
    rows = [row(sequence, text, tree) for sequence, text, tree in zip(sequences, texts, trees, strict=True)]
    rows = [rows[0], Row(chunk, texts[1][:40], 1), rows[1], Row(plain, texts[0][-1:], 1), rows[2]]
    got = iter(engine.forward(rows).split([each.num_logits for each in rows]))
    want = [as_chains(engine, text, tree) for text, tree in zip(texts, trees, strict=True)]
    for expected in (want[0], plainly(engine, texts[1][:40], 39), want[1], want[0][:1], want[2]):
        assert torch.equal(next(got), expected)
    for sequence in (*sequences, chunk, plain):
        engine.kv.close(sequence)


def play(engine: Engine, seed: int, rounds: int = 7) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits of trees, of which one path is kept each time, and those of plain decoding."""
    rng = random.Random(seed)
    text = [rng.choice(VOCAB) for _ in range(20 + 9 * seed)]
    sequence = opened(engine, text)
    for _ in range(rounds):
        tree = Tree.drawn(rng, rng.randint(1, 12))
        yield engine.forward([row(sequence, text, tree)]).clone(), as_chains(engine, text, tree)
        path = tree.path(rng.randint(-1, len(tree.parents) - 1)) if rng.random() < 0.5 else tree.deepest()
        engine.kv.keep(sequence, path)
        text = [*text, *tree.tokens(path)]
        assert sequence.tokens == text
        engine.kv.publish(sequence, len(text))
        text.append(rng.choice(VOCAB))
    engine.kv.close(sequence)


# The first one finds the fault below.
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2))])
def test_kept_nodes_go_on_as_a_chain(engine: Engine, seed: int) -> None:
    free = engine.kv.num_free_blocks
    for got, want in play(engine, seed):
        assert torch.equal(got, want)
    assert engine.kv.num_free_blocks == free


def test_a_move_to_the_wrong_slot_is_noticed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above would fail by it."""
    shipped = KVCacheManager.take_moves
    monkeypatch.setattr(
        KVCacheManager, "take_moves", lambda kv: [(source, target + 1) for source, target in shipped(kv)]
    )
    assert any(not torch.equal(got, want) for got, want in play(engine, 1))


def test_what_was_kept_is_found_by_others(engine: Engine) -> None:
    rng = random.Random(3)
    text = [rng.choice(VOCAB) for _ in range(60)]
    tree = Tree([rng.choice(VOCAB) for _ in range(12)], [-1, -1, 1, 2, 3, 4, 5, 6, 0, 0, 2, 7])
    sequence = opened(engine, text)
    engine.forward([row(sequence, text, tree)])
    engine.kv.keep(sequence, tree.path(11))
    text = [*text, *tree.tokens(tree.path(11))]
    engine.kv.publish(sequence, len(text))
    engine.kv.close(sequence)
    other = engine.kv.open([*text, 9], salt=b"tree")
    assert other.cached_len == len(text) // engine.info.block_size * engine.info.block_size
    got = engine.forward([Row(other, [*text[other.cached_len :], 9], 1)])
    assert torch.equal(got, plainly(engine, [*text, 9], len(text)))
    engine.kv.close(other)


def test_a_tree_that_is_not_kept_leaves_nothing(engine: Engine) -> None:
    rng = random.Random(4)
    text, tree = [rng.choice(VOCAB) for _ in range(45)], Tree.drawn(rng, 40)
    free, sequence = engine.kv.num_free_blocks, opened(engine, text)
    want = engine.forward([row(sequence, text, Tree([], []))]).clone()
    engine.kv.rewind(sequence, len(text) - 1)
    held = engine.kv.num_free_blocks
    for drop in (engine.kv.rewind, engine.kv.retract):
        assert torch.equal(engine.forward([row(sequence, text, tree)])[:1], want)
        drop(sequence, len(text) - 1)
        assert engine.kv.num_free_blocks == held
    # The next forward drops it too.
    engine.forward([row(sequence, text, tree)])
    engine.forward([Row(sequence, [5], 1)])
    with pytest.raises(ValueError, match="path"):
        engine.kv.keep(sequence, [0])
    engine.kv.close(sequence)
    assert engine.kv.num_free_blocks == free


def test_a_path_that_is_none_of_the_tree_is_refused(checkpoint: Path) -> None:
    engine = load_engine(checkpoint, EngineConfig(dtype="float32", num_blocks=16))
    sequence = engine.kv.open([])
    engine.forward([Row(sequence, [5, 6, 7, 8, 9], 4, parents=[-1, 0, 0])])
    for path in ([1], [0, 1, 2], [0, 3], [-1], [0, 0]):
        with pytest.raises(ValueError, match="path"):
            engine.kv.keep(sequence, path)
    assert sequence.tokens == [5, 6]
    engine.kv.keep(sequence, [0, 2])
    assert sequence.tokens == [5, 6, 7, 9]
    with pytest.raises(ValueError, match="path"):
        engine.kv.keep(sequence, [0])
    engine.kv.keep(sequence, [])


@pytest.mark.parametrize("parents", [[0, 0], [-1, 2], [-2], [-1] * 4])
def test_what_is_no_tree_is_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="parents"):
        Row(EngineSequence(), [5, 6, 7], 3, parents=parents)


def test_a_tree_is_bounded_and_a_chain_is_not() -> None:
    many = MAX_TREE_NODES + 1
    Row(EngineSequence(), [5] * many, many, parents=range(-1, many - 1))
    with pytest.raises(ValueError, match="at most 63"):
        Row(EngineSequence(), [5] * many, many, parents=[-1] * many)


def test_a_tree_needs_a_slot_a_node(checkpoint: Path) -> None:
    engine = load_engine(checkpoint, EngineConfig(dtype="float32", num_blocks=16, block_size=16))
    sequence = engine.kv.open([])
    engine.forward([Row(sequence, [5] * 250, 0)])
    assert engine.kv.blocks_needed(sequence, 1 + 5) == 0
    with pytest.raises(OutOfBlocks):
        engine.forward([Row(sequence, [5] * 8, 8, parents=[-1] * 7)])
    assert (sequence.cached_len, sequence.row) == (250, None)


@pytest.mark.parametrize("execution", ["fused", "transformers"])
def test_greedy_texts_from_any_trees_are_those_of_transformers(checkpoint: Path, execution: str) -> None:
    """Trees hold the right continuation at random places, or not at all."""
    rng, prompt, count = random.Random(5), [11, 42, 7, 99, 23], 60
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    want = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None)[0].tolist()
    engine = load_engine(checkpoint, EngineConfig(dtype="float32", num_blocks=32, execution=execution))
    text, num_kept = list(prompt), 0
    sequence = engine.kv.open(text)
    while len(text) < len(want):
        tree = Tree.drawn(rng, 10)
        for place, node in enumerate(tree.path(rng.randint(-1, 9))):
            tree.token_ids[node] = (want + [9] * 20)[len(text) + place]
        best = engine.forward([row(sequence, text, tree)]).argmax(-1).tolist()
        path, last = [], -1
        while (next_token := best[last + 1]) in (
            children := {tree.token_ids[n]: n for n, parent in enumerate(tree.parents) if parent == last}
        ):
            path.append(last := children[next_token])
        engine.kv.keep(sequence, path)
        num_kept += len(path)
        text = [*text, *tree.tokens(path), best[last + 1]]
    assert text[: len(want)] == want
    assert num_kept > count // 4
