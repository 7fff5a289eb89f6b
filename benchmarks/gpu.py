"""What a step costs on a GPU: against the memory's own speed, verifying against decoding, and against transformers.

    PYTHONPATH=services python -m benchmarks.gpu --json FILE

Needs PyTorch, Triton and transformers; no checkpoint: the model has random weights in the shape that --shape names.
Step times are medians by the caller's clock, from the rows to the verdicts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from outrider.engine import Engine, EngineConfig, EngineSequence, Row
from outrider.engine.loading.assembly import assemble
from outrider.engine.models.decoder import register_attention
from outrider.speculation import Candidate, SamplingParams, VerificationMode, verify
from outrider.tree import DraftTree
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512},
}
"""Llama 3's shapes, by number of parameters; "tiny" only tests the program."""
HEADS = {"8b": (32, 8, 128), "1b": (32, 8, 64), "tiny": (4, 2, 64)}
AIM_BANDWIDTH, AIM_VERIFY = 1.25, 1.1
POSITIONS = (1, 2, 3, 4, 5, 6, 8)
_PROMPT_CHUNK = 512
_MODES = {
    "greedy": (VerificationMode.GREEDY, SamplingParams(temperature=0)),
    "coupled": (VerificationMode.COUPLED, SamplingParams(temperature=0.8, top_p=0.95, seed=1)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("--device: CUDA is not available here\n")
        return 2
    torch.manual_seed(0)
    model = random_model(options.shape, options.dtype, device)
    figures: dict[str, Any] = {"machine": machine(device), "options": vars(options)}
    figures["weight_bytes"] = bytes_read_per_step(model)
    figures["copy_bytes_per_s"] = copy_bandwidth(device, options.copy_bytes)
    if options.matmuls:
        figures["matmuls"] = matmuls(model, device)
    if not options.no_peer:
        figures["transformers"] = transformers_step_ms(model, options)
    figures["steps"] = []
    for invariant, context in itertools.product(options.batch_invariant, options.contexts):
        for row in engine_steps(model_of(model), context, options, invariant=invariant == "true"):
            figures["steps"].append({"batch_invariant": invariant, **row})
            # What has been measured is kept if the rest has no time.
            keep(figures, options)
    figures |= summary(figures)
    report(figures)
    keep(figures, options)
    return 0


def keep(figures: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    add = found.add_argument
    add("--shape", choices=SHAPES, default="8b", help="of the model")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--device", default="cuda")
    add("--contexts", type=int, nargs="+", default=[512, 4096], metavar="TOKENS", help="cached before each step")
    add("--rows", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="sequences in a step")
    add("--positions", type=int, nargs="+", default=list(POSITIONS), metavar="N", help="tokens of each sequence")
    add("--mode", choices=_MODES, default="greedy", help="how rows are verified")
    add("--steps", type=int, default=60, metavar="N", help="timed steps of each kind")
    add("--attention", default="auto", help="of the engine: auto, triton, sdpa")
    add("--execution", default="auto", help="of the engine: auto, fused, transformers")
    add("--quantization", default="none", help="of the engine's weights: none, int8, fp8")
    add("--batch-invariant", nargs="+", default=["true"], choices=("true", "false"), help="of the engine, side by side")
    add("--no-graphs", action="store_true", help="launch every kernel")
    add("--min-tokens", type=int, default=16, metavar="N", help="recorded steps are multiples of this many tokens")
    add("--no-peer", action="store_true", help="leave transformers out")
    add("--peer-static", action="store_true", help="also transformers with a static cache, compiled: takes minutes")
    add("--matmuls", action="store_true", help="also the model's matrix products, each alone")
    add("--copy-bytes", type=int, default=4 << 30, metavar="N", help="of the copy that measures the memory")
    add("--json", default="", metavar="FILE", help="write all figures there")
    return found


def random_model(shape: str, dtype: str, device: torch.device) -> LlamaForCausalLM:
    """A model with random weights, made on the device."""
    config = llama_config(shape, dtype, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with device:
            return LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def llama_config(shape: str, dtype: str, **tokens: int | None) -> LlamaConfig:
    heads, kv_heads, head_dim = HEADS[shape]
    return LlamaConfig(
        **SHAPES[shape],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        dtype=dtype,
        **tokens,
    )


def bytes_read_per_step(model: PreTrainedModel) -> int:
    """Bytes of weights without the embedding table, of which a step reads only a few rows."""
    table = model.get_input_embeddings().weight
    total: int = sum(p.numel() * p.element_size() for p in model.parameters())
    return total - int(table.numel() * table.element_size())


def machine(device: torch.device) -> dict[str, Any]:
    import transformers

    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    if device.type == "cuda":
        import triton

        found |= {"triton": triton.__version__, "device": torch.cuda.get_device_name(device)}
    return found


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(run: Callable[[], object], device: torch.device, times: int, warm_up: int = 3) -> float:
    """Median seconds of one run, with a synchronization after each."""
    for _ in range(warm_up):
        run()
    synchronize(device)
    took = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        synchronize(device)
        took.append(time.perf_counter() - started)
    return statistics.median(took)


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes read and written per second by one large copy."""
    source = torch.ones(size // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_s(lambda: target.copy_(source), device, 15)


def matmuls(model: LlamaForCausalLM, device: torch.device) -> list[dict[str, Any]]:
    """Bandwidth of each of a layer's matrix products, layer after layer so that no weight is in a cache."""
    kinds = {
        "output": [layer.self_attn.o_proj.weight for layer in model.model.layers],
        "gate": [layer.mlp.gate_proj.weight for layer in model.model.layers],
        "down": [layer.mlp.down_proj.weight for layer in model.model.layers],
    }
    found = []
    for name, weights in kinds.items():
        for tokens in (1, 8, 16, 32, 64, 128):
            x = torch.randn(tokens, weights[0].shape[1], dtype=weights[0].dtype, device=device)

            def all_layers(x: torch.Tensor = x, weights: list[torch.Tensor] = weights) -> None:
                for weight in weights:
                    F.linear(x, weight)

            seconds = recorded(all_layers, device)
            size = sum(weight.nbytes for weight in weights)
            found.append({"product": name, "tokens": tokens, "bytes_per_s": size / seconds})
    return found


def recorded(run: Callable[[], None], device: torch.device) -> float:
    """Median seconds of the run as a CUDA graph, without launch costs."""
    if device.type != "cuda":
        return median_s(run, device, 5, warm_up=1)
    with torch.inference_mode():
        run()
        synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    return median_s(graph.replay, device, 20)


def transformers_step_ms(model: LlamaForCausalLM, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds per token of one greedy stream by model.generate, with its own attention and cache, by context."""
    model.set_attn_implementation("sdpa")
    caches = {"dynamic": None, "static": "static"} if options.peer_static else {"dynamic": None}
    found = {}
    for name, cache in caches.items():
        for context in options.contexts:
            found[f"{name} {context}"] = 1e3 * generate_s(model, context, cache, options.steps)
    return found


def generate_s(model: LlamaForCausalLM, context: int, cache: str | None, steps: int) -> float:
    """Seconds per token: a long answer's time less a short one's, which cancels the prefill."""
    prompt = torch.randint(3, model.config.vocab_size, (1, context), device=model.device)
    mask = torch.ones_like(prompt)
    few, many = 8, 8 + steps

    def answer(count: int) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                prompt,
                attention_mask=mask,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                cache_implementation=cache,
            )
        synchronize(model.device)
        return time.perf_counter() - started

    answer(few)
    answer(many)
    return statistics.median(answer(many) - answer(few) for _ in range(3)) / steps


def model_of(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same weights under another module tree, because an engine removes its model's projections."""
    with torch.device("meta"):
        copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict(), assign=True)
    copy.model.rotary_emb = model.model.rotary_emb
    copy.set_attn_implementation(register_attention())
    return copy


def engine_steps(
    model: LlamaForCausalLM, context: int, options: argparse.Namespace, *, invariant: bool
) -> Iterator[dict[str, Any]]:
    """Times for each number of rows and of positions, with `context` cached tokens per row."""
    block_size, longest = 16, context + max(options.positions)
    config = EngineConfig(
        dtype=options.dtype,
        device=options.device,
        block_size=block_size,
        attention=options.attention,
        execution=options.execution,
        quantization=options.quantization,
        cuda_graphs=not options.no_graphs,
        batch_invariant=invariant,
        graph_rows=max(options.rows),
        graph_min_tokens=options.min_tokens,
        prefix_cache=False,
    )
    blocks = max(options.rows) * (-(-longest // block_size) + 1)
    started = time.perf_counter()
    engine = assemble(model, config, num_blocks=blocks, max_context_len=longest + block_size)
    ready = {"assemble_s": time.perf_counter() - started}
    sequences = [prefilled(engine, context) for _ in range(max(options.rows))]
    for rows, positions in itertools.product(options.rows, options.positions):
        seconds = step_s(engine, sequences[:rows], positions, options)
        yield {"context": context, "rows": rows, "positions": positions, "step_ms": 1e3 * seconds} | ready
        ready = {}


def prefilled(engine: Engine, context: int) -> EngineSequence:
    tokens = torch.randint(3, engine.info.vocab_size, (context,)).tolist()
    sequence = engine.kv.open([])
    for start in range(0, context, _PROMPT_CHUNK):
        engine.forward([Row(sequence, tokens[start : start + _PROMPT_CHUNK], 0)])
    return sequence


def step_s(engine: Engine, sequences: list[EngineSequence], positions: int, options: argparse.Namespace) -> float:
    """Median seconds of a step that runs `positions` tokens of each sequence and verifies all but the first."""
    mode, params = _MODES[options.mode]
    drafted = list(range(7, 7 + positions))

    def step() -> None:
        lengths = [sequence.cached_len for sequence in sequences]
        logits = engine.forward([Row(sequence, drafted, positions) for sequence in sequences])
        verify(logits, [Candidate(params, mode, DraftTree(length + 1, tuple(drafted[1:]))) for length in lengths])
        for sequence, length in zip(sequences, lengths, strict=True):
            engine.kv.rewind(sequence, length)

    return median_s(step, torch.device(options.device), options.steps, warm_up=5)


def summary(figures: dict[str, Any]) -> dict[str, Any]:
    """The ratios that have a goal, for the first given context and number of rows."""
    first = figures["steps"][0]
    same = {s["positions"]: s["step_ms"] for s in figures["steps"] if matches(s, first)}
    floor_ms = 1e3 * figures["weight_bytes"] / figures["copy_bytes_per_s"]
    found: dict[str, Any] = {"floor_ms": floor_ms}
    if 1 in same:
        found["step_over_floor"] = same[1] / floor_ms
        found |= {"verify_5_over_decode_1": same[5] / same[1]} if 5 in same else {}
        for name, ms in figures.get("transformers", {}).items():
            if name.endswith(f" {first['context']}"):
                found[f"speed over transformers, {name.split()[0]} cache"] = ms / same[1]
    return found


def matches(step: dict[str, Any], first: dict[str, Any]) -> bool:
    return all(step[name] == first[name] for name in ("batch_invariant", "context", "rows"))


def report(figures: dict[str, Any]) -> None:
    def say(*words: object) -> None:
        sys.stdout.write(" ".join(str(word) for word in words) + "\n")

    say(*(f"{name} {value}," for name, value in figures["machine"].items()))
    say(f"weights read a step: {figures['weight_bytes'] / 1e9:.2f} GB")
    say(f"copy, bytes read and written: {figures['copy_bytes_per_s'] / 1e12:.2f} TB/s")
    say(f"floor of a step: {figures['floor_ms']:.3f} ms")
    for row in figures.get("matmuls", []):
        say(f"  {row['product']:>7} x {row['tokens']:>3} tokens  {row['bytes_per_s'] / 1e12:.2f} TB/s of weights")
    positions = sorted({step["positions"] for step in figures["steps"]})
    say("\nms of a step by positions\n")
    say("| context | rows | batch-invariant |", *(f"{p} |" for p in positions))
    say("|---|---|---|" + "---|" * len(positions))
    by_row: dict[tuple[int, int], dict[str, list[float]]] = {}
    for first in (s for s in figures["steps"] if s["positions"] == positions[0]):
        cells = {s["positions"]: s["step_ms"] for s in figures["steps"] if matches(s, first)}
        of = by_row.setdefault((first["context"], first["rows"]), {})
        of[first["batch_invariant"]] = [cells[p] for p in positions]
    for (context, rows), of in by_row.items():
        for invariant, times in of.items():
            say(f"| {context} | {rows} | {invariant} |", *(f"{ms:.3f} |" for ms in times))
        if len(of) == 2:
            ratios = (ours / torchs for ours, torchs in zip(of["true"], of["false"], strict=True))
            say(f"| {context} | {rows} | true / false |", *(f"{ratio:.2f} |" for ratio in ratios))
    for name, ms in figures.get("transformers", {}).items():
        say(f"transformers, {name} tokens: {ms:.3f} ms a token")
    say()
    aims = {"step_over_floor": AIM_BANDWIDTH, "verify_5_over_decode_1": AIM_VERIFY}
    for name, value in figures.items():
        if name in aims:
            say(f"{name.replace('_', ' ')}: {value:.3f} (aim: at most {aims[name]})")
        elif name.startswith("speed"):
            say(f"{name}: {value:.2f}")


if __name__ == "__main__":
    sys.exit(main())
