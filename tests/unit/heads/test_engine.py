"""Heads on the engine say what they say by themselves, over ragged sequences in a bounded pool."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.engine import EngineConfig, EngineSequence, Row
from outrider.engine.backends.cpu import KernelsMissing, load_kernels
from outrider.engine.checkpoints.checkpoints import read_config
from outrider.engine.checkpoints.quantization import Int8Linear
from outrider.engine.loading.draft_checkpoint import read_embedding, read_head
from outrider.heads import Eagle3Head, HeadDrafts, MtpHead, TargetParts
from outrider.heads.decoders import read_natively
from outrider.heads.eagle import EagleVariant
from outrider.heads.engine import HeadEngine, head_engine, torch_engine
from outrider.heads.interface import ChainMemory
from outrider.heads.layer import LayeredHead
from outrider.heads.runner import HeadRunner
from outrider.heads.tensors import settings_of
from outrider.sequence.speculation import Speculation
from torch import Tensor, nn

from tests.unit.engine.variants import slow_but_the_best
from tests.unit.target.harness import GREEDY, Bench, opening, prompts
from tests.unit.target.test_head_drafts import knowing

LENGTHS = (21, 1, 9)
KINDS = ["mtp", "mtp from a draft", "eagle3", "eagle3 of two layers"]


def made(kind: str, path: Path) -> LayeredHead:
    torch.manual_seed(0)
    parts = TargetParts(read_embedding(path).float(), read_head(path).float(), 2)
    settings = settings_of(read_config(path), path)
    variant = EagleVariant((0, 1, 2), parts.width, len(parts.head), fc_norm=True)
    head: LayeredHead
    if kind == "mtp":
        head = MtpHead(settings, parts, torch.arange(5, 300))
    elif kind == "mtp from a draft":
        head = MtpHead(settings, parts, norms_tokens=False, early=1)
    elif kind == "eagle3":
        head = Eagle3Head(replace(settings, layers=1), variant, parts)
    else:
        head = Eagle3Head(settings, replace(variant, norm_before_residual=True, norm_output=True), parts)
    for value in head.parameters():
        if value.dim() == 2 and len(value) != len(parts.head):
            nn.init.normal_(value, std=0.1)
    return head.eval().requires_grad_(False)


@dataclass
class Read:
    """Some texts, which a head reads in two steps, and then one token each of its own."""

    ids: list[Tensor]
    features: list[Tensor]

    @classmethod
    def some(cls) -> Read:
        torch.manual_seed(1)
        ids = [torch.randint(3, 259, (length + 1,)) for length in LENGTHS]
        return cls(ids, [torch.randn(length, 64) for length in LENGTHS])

    def alone(self, head: Any) -> list[Tensor]:
        """The logits after each text, and after the token of its own."""
        found = []
        for ids, features in zip(self.ids, self.features, strict=True):
            memory, count = ChainMemory(), len(features)
            out, hidden = head.forward(ids[None, :count], features[None], torch.arange(count)[None], memory)
            found.append(head.logits(hidden)[0, -1])
            _, hidden = head.forward(ids[None, count:], out[:, -1:], torch.tensor([[count]]), memory)
            found.append(head.logits(hidden)[0, -1])
        return found

    def on(self, engine: HeadEngine) -> list[Tensor]:
        rows = [(engine.kv.open([]), ids.tolist()) for ids in self.ids]
        few = [count // 2 for count in LENGTHS]
        first = [(kv, ids[:n], f[:n]) for (kv, ids), n, f in zip(rows, few, self.features, strict=True) if n]
        self._run(engine, first)
        rest = [(kv, ids[n:-1], f[n:]) for (kv, ids), n, f in zip(rows, few, self.features, strict=True)]
        logits, following = self._run(engine, rest)
        last, _ = self._run(engine, [(kv, ids[-1:], f[None]) for (kv, ids), f in zip(rows, following, strict=True)])
        return [each for pair in zip(logits, last, strict=True) for each in pair]

    def _run(
        self, engine: HeadEngine, rows: Sequence[tuple[EngineSequence, list[int], Tensor]]
    ) -> tuple[Tensor, Tensor]:
        features = torch.cat([each for *_, each in rows])
        logits, following = engine.forward_head([Row(kv, ids, 1) for kv, ids, _ in rows], features)
        return logits.clone(), following.float()


@pytest.mark.parametrize("kind", KINDS)
def test_in_torch_it_says_what_the_head_says_of_each_text_alone(tiny: Path, kind: str) -> None:
    head, texts = made(kind, tiny), Read.some()
    wanted, engine = texts.alone(head), torch_engine(head)
    assert engine is not None
    torch.testing.assert_close(torch.stack(texts.on(engine)), torch.stack(wanted), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("variant", slow_but_the_best())
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_the_kernels_read_the_target_s_states_as_torch_does(tiny: Path, kind: str, variant: str) -> None:
    try:
        kernels = load_kernels(variant)
    except KernelsMissing as error:
        pytest.skip(str(error))
    head = made("eagle3", tiny)
    if kind == "mtp":
        head.reads((0, 2), 64, normed=False)
    for norm in head.fc_norm:
        nn.init.normal_(norm.weight)
    states = torch.randn(1, 40, len(head.taps) * 64).bfloat16()
    wanted = head.features(states)
    read_natively(head, kernels)
    found = head.features(states)
    # Weights of 8 bits, and inputs of bfloat16 where the CPU multiplies it.
    assert (found - wanted).abs().max() < 0.02 * wanted.abs().max()
    # A position's bits are the same whatever it comes with.
    assert all(torch.equal(head.features(states[:, at : at + 1])[0, 0], found[0, at]) for at in (0, 13, 39))


@pytest.mark.parametrize("variant", slow_but_the_best())
@pytest.mark.parametrize("kind", KINDS)
def test_on_the_kernels_it_says_the_same_but_for_the_rounding_to_8_bits(tiny: Path, kind: str, variant: str) -> None:
    try:
        load_kernels(variant)
    except KernelsMissing as error:
        pytest.skip(str(error))
    head, texts = rounded(made(kind, tiny)), Read.some()
    wanted = torch.stack(texts.alone(head))
    config = EngineConfig(native_variant=variant, num_blocks=64)
    engine = head_engine(copy.deepcopy(head), config, 512)
    assert engine is not None and engine.info.execution == f"native-{variant}"
    found = torch.stack(texts.on(engine))
    assert float((found - wanted).abs().max()) < 0.1 * float(wanted.abs().max())
    # Neighbours are no nearer than that, or this would be no test.
    assert float((found - wanted.roll(1, 0)).abs().max()) > 0.5 * float(wanted.abs().max())


def rounded(head: LayeredHead) -> LayeredHead:
    """With the weights that 8 bits hold."""
    for module in [*head.layers.modules(), head.lm_head]:
        if isinstance(module, nn.Linear):
            eight = Int8Linear.of(module)
            module.weight.data = eight.weight.float() * eight.scale[:, None]
    return head


@pytest.mark.parametrize("num_blocks", [512, 6])
def test_a_head_holds_no_more_than_its_pool_and_gives_all_of_it_back(tiny: Path, num_blocks: int) -> None:
    head, own = knowing(tiny, 2), Speculation(max_own_draft_tokens=4)
    engine = torch_engine(head, num_blocks)
    assert engine is not None
    bench = Bench(tiny, sources=[HeadDrafts(head, engine=engine)], row_price=lambda cost: 0.0)
    what = [opening(prompt, max_new_tokens=30, params=GREEDY, speculation=own) for prompt in prompts(6)]
    assert bench.answer(what) == Bench(tiny).answer([replace(one, speculation=Speculation()) for one in what])
    assert bench.worker.stats.num_draft_tokens > 0 and not bench.worker.stats.num_source_failures
    assert engine.kv.num_free_blocks == num_blocks == engine.info.num_blocks


def test_no_draft_reads_a_position_beyond_the_context(tiny: Path) -> None:
    head = made("mtp", tiny)
    engine = head_engine(head, EngineConfig(execution="transformers", num_blocks=8), 64)
    assert engine is not None and engine.kv.num_free_blocks == 8
    positions, forward, tokens = list[int](), engine._decoder.forward, [5] * 63

    def noted(ids: Tensor, at: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        positions.extend(at.tolist())
        return forward(ids, at, *rest)

    engine._decoder.forward = noted  # type: ignore[method-assign]
    runner = HeadRunner(head, engine)
    text = runner.open(opening(tokens), tokens)
    with torch.inference_mode():
        runner.see(text, 0, torch.randn(62, 64))
        runner.read([text])
        [tree] = runner.draft([text], [5], [1e-12])
    assert tree.depth == 3 and max(positions) == 63


def test_a_head_does_not_read_a_prefix_again(tiny: Path) -> None:
    head = knowing(tiny, 2)
    engine = torch_engine(head)
    assert engine is not None
    bench = Bench(tiny, sources=[HeadDrafts(head, engine=engine)], row_price=lambda cost: 0.0)
    positions, forward_head = list[int](), engine.forward_head

    def counted(rows: Sequence[Row], features: Tensor) -> tuple[Tensor, Tensor]:
        positions.append(sum(len(row.token_ids) for row in rows))
        return forward_head(rows, features)

    engine.forward_head = counted  # type: ignore[method-assign]
    prompt, other = list(range(10, 110)), [9, *range(11, 110)]
    longest = []
    for number, one in enumerate((prompt, prompt, other)):
        positions.clear()
        bench.open(number, opening(one, max_new_tokens=4, speculation=Speculation(max_own_draft_tokens=4)))
        bench.run()
        longest.append(max(positions))
    # The first token is in the feature of position 0.
    assert longest[1] < 16 < longest[0] == longest[2]
