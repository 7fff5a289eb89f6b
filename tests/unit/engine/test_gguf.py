"""A GGUF file is a model like any other, once it is converted."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from gguf import GGMLQuantizationType
from outrider.checkpoint_files import end_tokens
from outrider.engine import EngineConfig, Row, resolve
from outrider.engine.backends.cpu import KernelsMissing, load_kernels
from outrider.engine.models.loader import load_engine
from outrider.engine.models.memory import count_linear
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from benchmarks.support.llama_gguf import write_gguf

PROMPT = [40, 41, 42, 43, 90, 91]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def logits(path: Path, quantization: str = "none") -> torch.Tensor:
    engine = load_engine(path, EngineConfig(dtype="float32", quantization=quantization, num_blocks=8))
    return engine.forward([Row(engine.kv.open(PROMPT), PROMPT, len(PROMPT))])


@pytest.mark.parametrize(
    ("kind", "off_by"),
    [(GGMLQuantizationType.F16, 0.01), (GGMLQuantizationType.Q8_0, 0.05), (GGMLQuantizationType.Q4_0, 0.6)],
    ids=["F16", "Q8_0", "Q4_0"],
)
def test_a_gguf_file_says_what_its_checkpoint_says(
    tiny: Path, tmp_path: Path, kind: GGMLQuantizationType, off_by: float
) -> None:
    converted = resolve(write_gguf(tiny, tmp_path / "tiny.gguf", kind))
    plain, found = logits(tiny), logits(converted)
    assert float((found - plain).norm() / plain.norm()) < off_by
    assert AutoTokenizer.from_pretrained(converted).encode("Hello, world") == AutoTokenizer.from_pretrained(
        tiny
    ).encode("Hello, world")
    assert end_tokens(converted) == (2,)


def test_q4_0_keeps_its_bits_and_means_what_transformers_reads(tiny: Path, tmp_path: Path) -> None:
    file = write_gguf(tiny, tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_0)
    stored = load_file(resolve(file) / "model.safetensors")
    as_read = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, quantization_config=as_read, dtype=torch.float32
    )
    layers = {name: weight for name, weight in model.state_dict().items() if "_proj." in name}
    for name, weight in layers.items():
        numbers = torch.stack([stored[f"{name}_packed"] >> place & 15 for place in range(0, 32, 4)], -1).flatten(1)
        scale = stored[f"{name}_scale"].float().repeat_interleave(32, 1)
        assert torch.equal((numbers - 8) * scale, weight), name
    assert not layers.keys() & stored.keys()


def test_q4_0_runs_on_the_kernels_in_four_bits(tiny: Path, tmp_path: Path) -> None:
    try:
        load_kernels("auto")
    except KernelsMissing as error:
        pytest.skip(str(error))
    file = write_gguf(tiny, tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_0)
    engines = [load_engine(path, EngineConfig(execution="native", num_blocks=8)) for path in (resolve(file), tiny)]
    four, plain = (engine.weight_bytes for engine in engines)
    linear = count_linear(tiny).stored
    assert linear * (16 - 5 - 1.5) / 8 < plain - four <= linear * (16 - 5) / 8


def test_it_is_converted_once(tiny: Path, tmp_path: Path) -> None:
    file = write_gguf(tiny, tmp_path / "tiny.gguf")
    said: list[str] = []
    converted = resolve(file, said.append)
    # Parsing a large vocabulary takes seconds, in which nothing else of a stack starts.
    with patch("gguf.GGUFReader", side_effect=AssertionError):
        assert resolve(file, said.append) == converted
    assert len(said) == 1


@pytest.mark.parametrize(("kind", "said"), [("Q8_0", True), ("Q4_0", False), ("F16", False), ("BF16", False)])
def test_the_user_learns_which_weights_become_wider(tiny: Path, tmp_path: Path, kind: str, said: bool) -> None:
    file = write_gguf(tiny, tmp_path / "tiny.gguf", GGMLQuantizationType[kind])
    lines: list[str] = []
    resolve(file, lines.append)
    assert (f"its weights in {kind} become bfloat16" in lines[0]) == said


def test_weights_are_written_once_where_none_keeps_its_bits(tiny: Path, tmp_path: Path) -> None:
    """Reading and writing a large model once more takes its size in memory, and minutes."""
    file = write_gguf(tiny, tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0)
    with patch("outrider.engine.checkpoints.gguf_fours.save_file") as again:
        resolve(file)
    again.assert_not_called()


def test_workers_that_start_together_convert_it_once(tiny: Path, tmp_path: Path) -> None:
    file = write_gguf(tiny, tmp_path / "tiny.gguf")
    converting, waiting, said = threading.Event(), threading.Event(), list[str]()

    def first(line: str) -> None:
        said.append(line)
        converting.set()
        # Not for ever: without a lock the second never waits.
        waiting.wait(60)

    def second(line: str) -> None:
        said.append(line)
        waiting.set()

    with ThreadPoolExecutor() as threads:
        found = [threads.submit(resolve, file, first)]
        assert converting.wait(60)
        found.append(threads.submit(resolve, file, second))
        assert len({one.result() for one in found}) == 1
    assert [line.partition(" ")[0] for line in said] == ["converting", "another"]


def test_it_can_be_held_in_fewer_bits_like_any_other(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    converted = resolve(write_gguf(tiny, tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0))
    plain, found = logits(converted), logits(converted, "int8")
    assert 1e-4 < float((found - plain).norm() / plain.norm()) < 0.05
