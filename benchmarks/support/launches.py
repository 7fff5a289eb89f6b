"""Counts what a step launches on a GPU, and what it copies between host and device, without one.

The engine's own code runs on a CPU as it would on a GPU. An operation of torch that is no view counts as one launch,
which is the least that it can be. Kernels of the model are counted and not run; those that choose
tokens are interpreted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from outrider.engine import EngineConfig, Row
from outrider.engine.attention.paged import TritonAttention
from outrider.engine.loading.assembly import assemble
from outrider.engine.models.decoder import register_attention
from outrider.engine.run.buckets import choose, make_buckets
from outrider.engine.run.graphs import GraphRecorder, GraphRunner, GraphShape, Recorded
from outrider.heads import MtpHead, TargetParts
from outrider.heads.engine import head_engine
from outrider.heads.interface import HeadSettings
from outrider.heads.runner import HeadRunner
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import Candidate, LogitsOptions, LogitsProcessor, SamplingParams, VerificationMode
from outrider.speculation.batched import verify_batched
from outrider.tree import DraftTree
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from triton.runtime.interpreter import InterpretedFunction

SHAPES = {"8b": (32, 32, 8), "smollm2": (30, 9, 3)}
"""Layers, heads and key heads. Widths are small: they change no count."""
_VOCABULARY, _BLOCK, _CONTEXT, _ROWS = 512, 16, 64, 4
_HEAD_TOKENS = 4
_PRODUCTS = {"mm", "addmm", "bmm", "linear"}
_ATTENTION = {"attend_kernel", "reduce_kernel"}
_UNWRITTEN = {"empty", "empty_strided", "new_empty", "empty_like"}
_NOTHING = _UNWRITTEN | {"detach", "_unsafe_view", "lift_fresh", "resolve_conj"}
_CONFIG = EngineConfig(num_blocks=64, attention="triton", execution="transformers", prefix_cache=False)


class _Rerun(GraphRecorder):
    """Runs again what a GPU would replay."""

    def __init__(self) -> None:
        pass

    def record(self, run: Callable[[], None]) -> Recorded:
        return SimpleNamespace(replay=run)


class Counts(Counter[str]):
    """By name; copies are "to device" and "to host"."""

    @property
    def products(self) -> int:
        return sum(count for name, count in self.items() if name in _PRODUCTS or name.startswith("product"))

    @property
    def attention(self) -> int:
        return sum(self[name] for name in _ATTENTION)

    @property
    def copies(self) -> tuple[int, int]:
        return self["to device"], self["to host"]

    @property
    def others(self) -> int:
        return self.total() - self.products - self.attention - sum(self.copies)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _NOTHING:
            self._counts[name] += 1
        found = func(*args, **(kwargs or {}))
        # Nothing may write it: a kernel that is not run leaves it as it is.
        return found.zero_() if name in _UNWRITTEN else found


class _Copies(TorchFunctionMode):
    """What crosses between the devices if there were two. Everything inside is no launch."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name, sends = getattr(func, "__name__", ""), "non_blocking" in given
        to_device = (sends and name in ("to", "copy_")) or (name == "tensor" and given.get("device") is not None)
        if to_device or name in ("cpu", "item", "__bool__", "__int__", "__float__"):
            self._counts["to device" if to_device else "to host"] += 1
            with _paused():
                return func(*args, **given)
        return func(*args, **given)


@contextmanager
def _paused() -> Iterator[None]:
    with torch.utils._python_dispatch._disable_current_modes():
        yield


@contextmanager
def counted(interpret: Sequence[str] = ()) -> Iterator[Counts]:
    """interpret: parts of the names of modules whose kernels are run."""
    counts, run = Counts(), InterpretedFunction.run

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        counts[self.fn.__name__] += 1
        if any(part in self.fn.__module__ for part in interpret):
            with _paused():
                run(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = noted
    try:
        with _Copies(counts), _Operations(counts):
            yield counts
    finally:
        InterpretedFunction.run = run


_GREEDY = SamplingParams(temperature=0)
_SAMPLED = SamplingParams(temperature=0.8, top_k=20, top_p=0.95, seed=1)
_PENALTIES = LogitsOptions(presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.1)
_PROMPT = list(range(3, 20))


def counts_of(shape: str) -> dict[str, Counts]:
    """Of each kind of step, of several sequences, and of a head's proposal for as many."""
    found, step = {}, _model(shape)
    for name, (positions, params, options) in {
        "decode": (1, _GREEDY, None),
        "5 positions": (5, _GREEDY, None),
        "5, sampled": (5, _SAMPLED, None),
        "5, sampled, penalties": (5, _SAMPLED, _PENALTIES),
    }.items():
        with counted() as model:
            step(positions)
        found[name] = Counts(model + _verdict(positions, params, options))
    step = _model(shape, "fp8")
    with counted() as model:
        step(1)
    found["decode, fp8"] = Counts(model + _verdict(1, _GREEDY, None))
    found[f"head, {_HEAD_TOKENS} tokens"] = _proposal(shape)
    return found


def _model(shape: str, quantization: str = "none") -> Callable[[int], None]:
    """Runs what the graph of a step of so many positions records, and sends its inputs."""
    layers, heads, kv_heads = SHAPES[shape]
    with torch.device("cpu"):
        model = LlamaForCausalLM(_llama(heads, kv_heads, layers)).bfloat16()
    model.set_attn_implementation(register_attention())
    execution = "fused" if quantization == "none" else "auto"
    config = replace(_CONFIG, execution=execution, quantization=quantization)
    engine = assemble(model, config, num_blocks=64, max_context_len=_CONTEXT)
    attention = engine._attention
    assert isinstance(attention, TritonAttention)
    graphs = GraphShape(make_buckets(_ROWS, 64), _VOCABULARY, _CONTEXT // _BLOCK, 0)
    runner = GraphRunner(engine._decoder, attention, engine._cache, graphs, torch.device("cpu"), _Rerun())
    sequences = [engine.kv.open([]) for _ in range(_ROWS)]

    def step(positions: int) -> None:
        laid_out = engine._lay_out([Row(sequence, [7] * positions, positions) for sequence in sequences])
        bucket = choose(runner.buckets, _ROWS, laid_out.num_tokens)
        assert bucket is not None
        runner._inputs.send(laid_out)
        runner.decode(bucket, runner.batch(bucket), ())

    return step


def _llama(heads: int, kv_heads: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=8 * heads,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        vocab_size=_VOCABULARY,
        max_position_embeddings=_CONTEXT,
    )


def _verdict(positions: int, params: SamplingParams, options: LogitsOptions | None) -> Counts:
    mode = VerificationMode.GREEDY if params.greedy else VerificationMode.COUPLED
    logits = 3 * torch.randn(_ROWS * positions, _VOCABULARY, generator=torch.Generator().manual_seed(1))
    processor = None if options is None else LogitsProcessor(options, _PROMPT)
    draft = DraftTree(len(_PROMPT), (7,) * (positions - 1))
    with counted(["speculation"]) as counts:
        verify_batched(logits, [Candidate(params, mode, draft, processor) for _ in range(_ROWS)])
    return counts


def _proposal(shape: str) -> Counts:
    """Of a head of one layer that has seen one position more of each text."""
    _, heads, kv_heads = SHAPES[shape]
    settings = HeadSettings(8 * heads, heads, kv_heads, 16, 64, 1e-5, _llama(heads, kv_heads, 1))
    target = TargetParts(torch.randn(_VOCABULARY, settings.width), 50 * torch.randn(_VOCABULARY, settings.width), 4)
    head = MtpHead(settings, target).bfloat16().eval().requires_grad_(False)
    engine = head_engine(head, _CONFIG, _CONTEXT)
    assert engine is not None
    engine.record(head, _Rerun(), 0)
    runner = HeadRunner(head, engine)
    spec = SequenceSpec(tuple(_PROMPT), _GREEDY, VerificationMode.GREEDY, 32, speculation=Speculation(_HEAD_TOKENS))
    tokens = [list(_PROMPT) for _ in range(_ROWS)]
    texts = [runner.open(spec, each) for each in tokens]
    states = torch.ones(len(_PROMPT), settings.width).bfloat16()
    with torch.inference_mode(), counted(["speculation"]) as counts:
        for text in texts:
            runner.see(text, 0, states)
        runner.read(texts)
        counts.clear()
        for text, own in zip(texts, tokens, strict=True):
            own.append(7)
            runner.see(text, len(_PROMPT), states[:1])
        runner.read(texts)
        runner.draft(texts, [_HEAD_TOKENS] * _ROWS)
    return counts
