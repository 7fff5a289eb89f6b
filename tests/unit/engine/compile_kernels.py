"""Compiles every kernel that the engine launches, for GPUs that are not here.

    python tests/unit/engine/compile_kernels.py [--archs 80 90] [--models llama-8b] [--kernels NAME] [--write]

The launches are the engine's own: its code runs on tensors without data, with a recorder in the place of Triton's
launcher. What each arrives with is compiled for each card. Prints one line of JSON for each: registers, spilt bytes,
shared memory, and how many blocks a multiprocessor holds. `--write` keeps these as the bounds of later compiles. With
`--kept FILE` what is in the file is not compiled again, unless the kernel, Triton or how it is compiled has changed.

Run in a process of its own: kernels are either interpreted or compiled, as the environment says when they are imported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from inspect import getsource
from pathlib import Path
from typing import Any

import torch
import triton
from outrider.engine.attention import KVCache, paged_kernels
from outrider.engine.attention.layout import TILE_FIELDS, TOKEN_FIELDS
from outrider.engine.attention.paged import NUM_SPLITS, Shape, TritonBatch
from outrider.engine.checkpoints.quantization import quantize
from outrider.engine.models import fused_gpu, llama_kernels
from outrider.speculation import Candidate, LogitsOptions, LogitsProcessor, choice_kernels, choosing
from outrider.speculation.changes import Changes
from outrider.speculation.columns import Columns
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BOUNDS = Path(__file__).with_name("kernel_bounds.json")
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
DTYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
BLOCK_SIZE = 16
REGISTERS = 65536
"""Of a multiprocessor."""


@dataclass(frozen=True)
class Card:
    shared_block: int
    """Most bytes of shared memory of one block."""
    shared: int
    """Bytes of shared memory of a multiprocessor."""
    warps: int


CARDS = {
    80: Card(166912, 167936, 64),
    89: Card(101376, 102400, 48),
    90: Card(232448, 233472, 64),
    100: Card(232448, 233472, 64),
}

# Width, inner width, heads, key heads, head_dim; and the windows of its layers, where some have one.
MODELS = {
    "llama-8b": (4096, 14336, 32, 8, 128),
    "llama-70b": (8192, 28672, 64, 8, 128),
    "llama-1b": (2048, 8192, 32, 8, 64),
    "qwen2.5-7b": (3584, 18944, 28, 4, 128),
    "smollm2-135m": (576, 1536, 9, 3, 64),
    "phi-3-mini": (3072, 8192, 32, 32, 96, 2047),
    "gemma-3-4b": (2560, 10240, 8, 4, 256, None, 1024),
    "llama-2-7b": (4096, 11008, 32, 32, 128),
    "mistral-7b": (4096, 14336, 32, 8, 128, 4096),
    "qwen3-8b": (4096, 12288, 32, 8, 128),
}
# Tiles of few queries and of many, and the tokens: products have their smallest tile and their largest.
STEPS = (((1, 0), 8), ((0, 1), 128))


@dataclass(frozen=True)
class Launch:
    """A kernel with all that Triton compiles into it."""

    kernel: str
    arguments: tuple[tuple[str, str, bool], ...]
    """Name, type, and whether it is a multiple of 16."""
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int

    def compiles_for(self, arch: int) -> bool:
        """Cards before Ada read no fp8."""
        return arch >= 89 or all("fp8" not in kind for _, kind, _ in self.arguments)

    @property
    def name(self) -> str:
        """What the bounds are kept under."""
        sizes = ",".join(f"{name}={value}" for name, value in self.constants)
        kinds = sorted({kind[1:] for _, kind, _ in self.arguments if kind.startswith("*")} - {"i64"})
        return f"{self.kernel} {'/'.join(kinds)} {sizes}"


class Recorder:
    """Stands for a module of kernels, and keeps what each is launched with."""

    def __init__(self, module: Any, found: dict[Launch, None]) -> None:
        self._module = module
        self._found = found

    def __getattr__(self, name: str) -> Launcher:
        return Launcher(self, getattr(self._module, name))

    def add(self, kernel: Any, values: Sequence[Any], options: dict[str, Any]) -> None:
        warps, stages = options.pop("num_warps", 4), options.pop("num_stages", 3)
        constants, arguments = dict(options), []
        for parameter, value in zip(kernel.params, values, strict=False):
            if isinstance(value, torch.Tensor):
                # The allocator's addresses are multiples of 16; a view of a step's layout may begin anywhere.
                kind = DTYPES[value.dtype]
                arguments.append((parameter.name, kind, not parameter.do_not_specialize_on_alignment))
            elif parameter.do_not_specialize:
                arguments.append((parameter.name, "i32", False))
            elif isinstance(value, float):
                arguments.append((parameter.name, "fp32", False))
            elif value == 1:
                constants[parameter.name] = 1
            else:
                arguments.append((parameter.name, "i32", value % 16 == 0))
        launch = Launch(kernel.__name__, tuple(arguments), tuple(sorted(constants.items())), warps, stages)
        self._found[launch] = None


@dataclass(frozen=True)
class Launcher:
    recorder: Recorder
    kernel: Any

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *values, **options: self.recorder.add(self.kernel, values, options)


def launches(models: Sequence[str], dtypes: Sequence[torch.dtype]) -> list[Launch]:
    """What the engine launches for these models, each once."""
    found: dict[Launch, None] = {}
    with torch.device("meta"):
        for name in models:
            for dtype in dtypes:
                _run(name, dtype, found)
        # Weights of 8 bits change products only, which are the same for all models.
        for method in ("int8", "fp8"):
            _run("llama-8b", torch.bfloat16, found, method)
        _sample(Recorder(choice_kernels, found))
    return list(found)


def _sample(kernels: Any) -> None:
    choosing._kernels = lambda: kernels
    rows, reals, integers = torch.zeros(32, dtype=torch.int64), torch.zeros(4, 32).double(), torch.zeros(3, 32).long()
    columns = {"numbers": rows, "reals": reals, "integers": integers}
    changes = Columns()
    Changes([Candidate(processor=LogitsProcessor(LogitsOptions(presence_penalty=1.0), [0]))]).lay_out(changes)
    with torch.device("cpu"):
        changed = changes.send(torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(32, 128256, dtype=dtype)
        choosing.choose(logits, {})
        choosing.choose(logits, columns)
        choosing.choose(logits, changed)
        choosing.guess(logits, {}, None, 3)
        choosing.guess(logits, columns, rows, 3)
    choosing.choose(torch.zeros(32, 128256), {**columns, "quotas": torch.zeros(32, 2, 64, dtype=torch.int64)})


def _run(name: str, dtype: torch.dtype, found: dict[Launch, None], method: str = "none") -> None:
    width, inner, heads, kv_heads, head_dim, *of_layers = MODELS[name]
    windows = of_layers or [None]
    # Qwen 3 norms each query and key.
    config = (Qwen3Config if name.startswith("qwen3") else LlamaConfig)(
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_hidden_layers=len(windows),
        vocab_size=64,
    )
    paged, llama = Recorder(paged_kernels, found), Recorder(llama_kernels, found)
    drawn = AutoModelForCausalLM.from_config(config, dtype=dtype)
    quantize(drawn, method)
    model = fused_gpu.GpuLlama(drawn, 64)
    model._kernels, model._multiply = llama, replace(model._multiply, kernels=llama)
    shape = Shape(heads, kv_heads, head_dim, BLOCK_SIZE)
    cache = KVCache(*(torch.zeros(2, kv_heads, 64, head_dim, dtype=dtype) for _ in range(2)))
    numbers = torch.zeros(max(count for _, count in STEPS), dtype=torch.int64)
    views = dict.fromkeys((*TOKEN_FIELDS, *TILE_FIELDS, "blocks"), numbers)
    for tiles, count in STEPS:
        batch = TritonBatch(shape, paged, cache, views, tiles, NUM_SPLITS, None, tuple(windows))
        model.forward(numbers[:count], numbers[:count], numbers[:count], batch)
    # Decoders of other shapes have their keys written by a kernel of their own.
    key = torch.zeros(32, kv_heads, head_dim, dtype=dtype)
    batch.store(key, key, 0)


def _kernel(launch: Launch) -> Any:
    modules = paged_kernels, llama_kernels, choice_kernels
    return next(found for module in modules if (found := getattr(module, launch.kernel, None)))


def compiled(launch: Launch, arch: int) -> dict[str, Any]:
    """What the assembler made of it for one card."""
    kernel = _kernel(launch)
    kinds = {name: kind for name, kind, _ in launch.arguments}
    signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
    at = kernel.arg_names.index
    aligned = {(at(name),): [["tt.divisibility", 16]] for name, _, multiple in launch.arguments if multiple}
    constants = {(at(name),): value for name, value in launch.constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _tool("-res-usage", file.name)
    sizes = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    card, shared = CARDS[arch], made.metadata.shared
    registers = sizes["REG"] * 32 * launch.warps
    return {
        "registers": sizes["REG"],
        "spilt": sizes["STACK"] + sizes["LOCAL"],
        "shared": shared,
        "fits": shared <= card.shared_block,
        "blocks": min(REGISTERS // registers, card.warps // launch.warps, card.shared // (shared + 1024)),
        "tensor_cores": sorted(set(re.findall(r"\w*mma\.[\w.]+", made.asm["ptx"]))),
    }


def _tool(*arguments: str) -> str:
    return subprocess.run([TOOLS / "cuobjdump", *arguments], capture_output=True, text=True, check=True).stdout


Task = tuple[Launch, int]
"""A launch, and the card that it is compiled for."""


def _line(task: Task) -> dict[str, Any]:
    launch, arch = task
    return {"arch": arch, "kernel": launch.kernel, "name": launch.name, **compiled(launch, arch)}


def lines(tasks: Sequence[Task], kept: Path) -> Iterator[dict[str, Any]]:
    """Of each task, in their order. New ones are added to the file as soon as they are there."""
    keys = {task: _key(task) for task in tasks}
    known = {line["key"]: line for line in map(json.loads, kept.read_text().splitlines())} if kept.exists() else {}
    # The long ones first: at the end no core waits for another.
    missing = sorted((task for task in tasks if keys[task] not in known), key=lambda task: task[0].kernel)
    with ProcessPoolExecutor() as pool, kept.open("a") as file:
        for task, line in zip(missing, pool.map(_line, missing), strict=True):
            known[keys[task]] = line
            print(json.dumps({"key": keys[task], **line}), file=file, flush=True)
    yield from (known[keys[task]] for task in tasks)


def _key(task: Task) -> str:
    """Changes with all that a line depends on."""
    made_by = getsource(compiled), CARDS, triton.__version__
    return hashlib.sha256(repr((made_by, _kernel(task[0]).cache_key, task)).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--archs", type=int, nargs="+", default=list(CARDS), choices=list(CARDS))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--kernels", nargs="+", default=[], metavar="NAME", help="default: all")
    parser.add_argument("--kept", type=Path, default=Path(os.devnull), metavar="FILE", help="results of earlier runs")
    parser.add_argument("--write", action="store_true", help="with --kernels the bounds of others stay")
    options = parser.parse_args()
    found = launches(options.models, [getattr(torch, name) for name in options.dtypes])
    found = [launch for launch in found if not options.kernels or launch.kernel in options.kernels]
    known = json.loads(BOUNDS.read_text()) if options.kernels else {}
    bounds = {name: cards for name, cards in known.items() if name.split()[0] not in options.kernels}
    tasks = [(launch, arch) for arch in options.archs for launch in found if launch.compiles_for(arch)]
    for line in lines(tasks, options.kept):
        print(json.dumps(line), flush=True)
        bounds.setdefault(line["name"], {})[str(line["arch"])] = [line["registers"], line["blocks"], line["spilt"]]
    if options.write:
        written = [f"{json.dumps(name)}: {json.dumps(cards)}" for name, cards in sorted(bounds.items())]
        BOUNDS.write_text("{\n" + ",\n".join(written) + "\n}\n")


if __name__ == "__main__":
    main()
