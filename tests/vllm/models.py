"""The models of commands and of tests."""

from __future__ import annotations

from pathlib import Path

from outrider.engine import resolve
from outrider.testing.tiny import tiny_checkpoint


def checkpoint(name: str, directory: Path, max_context_len: int = 512) -> Path:
    """`tiny`, made here with heads of a size that vLLM's attention for CPUs has and with so much room; or one by its
    directory or name, such as smollm2-135m-instruct."""
    if name != "tiny":
        return resolve(name)
    return tiny_checkpoint(directory / name, head_dim=32, max_context_len=max_context_len)
