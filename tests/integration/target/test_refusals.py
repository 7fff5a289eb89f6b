"""What a worker that cannot start says: one line that names what is wrong, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from outrider.testing.tiny import tiny_tokenizer

# The start of a worker is some 5 s of processor time.
pytestmark = pytest.mark.slow


def said(role: str, *arguments: str, **environment: str) -> str:
    """What the process wrote of its end."""
    command = [sys.executable, "-m", f"outrider.{role}", "--listen", "127.0.0.1:0", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "t5"
    config = transformers.T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, vocab_size=384)
    transformers.T5ForConditionalGeneration(config).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_gpu_that_is_not_there_is_one_line(role: str, tiny: Path) -> None:
    assert said(role, "--model", str(tiny), "--device", "cuda").startswith(f"outrider.{role}: device: cuda: ")


def test_an_encoder_with_a_decoder_is_one_line(t5: Path) -> None:
    assert "model_type t5: an encoder with a decoder" in said("target", "--model", str(t5))


def test_a_home_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    printed = said("target", "--model", "smollm2-135m-instruct", HOME=str(tmp_path / "home"), OUTRIDER_CACHE="")
    assert printed.startswith("outrider.target: OUTRIDER_CACHE: ")
