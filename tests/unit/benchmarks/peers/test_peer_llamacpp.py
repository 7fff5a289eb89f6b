"""llama.cpp as a peer: the file it reads, the batches it is given, and what its environment needs."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from numpy.typing import NDArray
from outrider.testing.tiny import tiny_checkpoint, tiny_tokenizer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from benchmarks.peers import gguf_export, install
from benchmarks.peers.peer_llamacpp import LlamaCpp
from benchmarks.support.llama_gguf import permuted, write_gguf

HEADS, HEAD_DIM, LENGTH = 3, 8, 5
VOCAB = 16


def rotate_neighbours(rows: NDArray[np.float32], theta: float) -> NDArray[np.float32]:
    """llama.cpp's rotation of [heads, positions, head_dim]: pairs (0, 1), (2, 3), ..."""
    angles = np.outer(np.arange(rows.shape[1]), theta ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    pairs = rows.reshape(*rows.shape[:2], -1, 2)
    rotated = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
    return np.stack([rotated.real, rotated.imag], -1).reshape(rows.shape)


def test_permuted_weights_rotated_by_neighbours_attend_as_transformers_does() -> None:
    width, theta = HEADS * HEAD_DIM, 100.0
    config = LlamaConfig(
        hidden_size=width, num_attention_heads=HEADS, head_dim=HEAD_DIM, rope_parameters={"rope_theta": theta}
    )
    generator = torch.Generator().manual_seed(0)
    hidden, q_weight, k_weight = (torch.randn(n, width, generator=generator) for n in (LENGTH, width, width))

    def heads(values: Tensor) -> Tensor:
        return values.view(LENGTH, HEADS, HEAD_DIM).transpose(0, 1)

    cos, sin = LlamaRotaryEmbedding(config)(hidden[None], torch.arange(LENGTH)[None])
    q, k = apply_rotary_pos_emb(heads(hidden @ q_weight.T)[None], heads(hidden @ k_weight.T)[None], cos, sin)
    settings = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    theirs = []
    for name, weight in (("q_proj", q_weight), ("k_proj", k_weight)):
        moved = torch.from_numpy(permuted(name, weight.numpy(), settings).copy())
        theirs.append(rotate_neighbours(heads(hidden @ moved.T).numpy(), theta))
    assert np.allclose(theirs[0] @ theirs[1].swapaxes(1, 2), (q @ k.mT)[0].numpy(), atol=1e-3)


@pytest.fixture
def in_bfloat16(tmp_path: Path) -> Path:
    tiny = tiny_checkpoint(tmp_path / "plain")
    AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_the_file_holds_the_checkpoints_own_bits(in_bfloat16: Path, tmp_path: Path) -> None:
    reader = GGUFReader(gguf_export.export(in_bfloat16, "BF16", tmp_path / "made"))
    config = AutoConfig.from_pretrained(in_bfloat16)
    assert reader.fields["llama.rope.freq_base"].contents() == config.rope_parameters["rope_theta"]
    weights = load_file(in_bfloat16 / "model.safetensors")
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert len(found) == len(weights)
    for name, held in (("model.layers.1.mlp.up_proj", "blk.1.ffn_up"), ("model.embed_tokens", "token_embd")):
        tensor = found[f"{held}.weight"]
        assert tensor.tensor_type is GGMLQuantizationType.BF16
        assert tensor.data.tobytes() == weights[f"{name}.weight"].view(torch.uint8).numpy().tobytes()


def test_the_file_is_made_once(in_bfloat16: Path, tmp_path: Path) -> None:
    first = gguf_export.export(in_bfloat16, "BF16", tmp_path / "made")
    made = first.stat()
    assert gguf_export.export(in_bfloat16, "BF16", tmp_path / "made").stat() == made
    assert [path.name for path in first.parent.iterdir()] == ["tiny-BF16.gguf"]


def test_a_rope_that_the_file_would_not_say_is_refused(in_bfloat16: Path, tmp_path: Path) -> None:
    config = in_bfloat16 / "config.json"
    config.write_text(config.read_text().replace('"rope_type": "default"', '"rope_type": "linear"'))
    with pytest.raises(ValueError, match="linear"):
        write_gguf(in_bfloat16, tmp_path / "x.gguf")


class FakeLibrary:
    """The C interface with a model that answers each token with the next id. Keeps the batches it was given."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, int, int, bool]]] = []
        """(token, position, sequence, whether its logits are wanted)"""
        self._logits: Any = None

    def __getattr__(self, name: str) -> Any:
        return lambda *_: SimpleNamespace()

    def llama_vocab_n_tokens(self, _: object) -> int:
        return VOCAB

    def llama_batch_init(self, count: int, *_: int) -> Any:
        ints = {name: [0] * count for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(count)], **ints)

    def llama_decode(self, _: object, batch: Any) -> int:
        taken = range(batch.n_tokens)
        given = [(batch.token[i], batch.pos[i], batch.seq_id[i][0], bool(batch.logits[i])) for i in taken]
        self.batches.append(given)
        rows = np.eye(VOCAB, dtype=np.float32)[[token + 1 for token, *_, wanted in given if wanted]]
        self._logits = (ctypes.c_float * rows.size).from_buffer_copy(rows.tobytes())
        return 0

    def llama_get_logits(self, _: object) -> Any:
        return ctypes.cast(self._logits, ctypes.POINTER(ctypes.c_float))


def test_a_step_gives_each_sequence_the_token_that_follows_its_own_last_one() -> None:
    library = FakeLibrary()
    peer = LlamaCpp(library, "a file", threads=1)
    peer.open([[3, 4], [8, 9]])
    peer.decode(2)
    assert library.batches == [
        [(3, 0, 0, False), (4, 1, 0, True)],
        [(8, 0, 1, False), (9, 1, 1, True)],
        [(5, 2, 0, True), (10, 2, 1, True)],
        [(6, 3, 0, True), (11, 3, 1, True)],
    ]


def test_prefill_starts_from_nothing_every_time() -> None:
    library = FakeLibrary()
    peer = LlamaCpp(library, "a file", threads=1)
    for _ in range(2):
        peer.prefill([3, 4])
    assert library.batches[0] == library.batches[1]


def test_torch_is_installed_only_where_it_is_asked_for() -> None:
    assert install.torch_for(["numpy", "torch==2.13.0+cpu; platform_machine == 'x'"])
    assert not install.torch_for(["numpy", 'torch>=2; extra == "bench"'])
