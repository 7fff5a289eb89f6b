"""Exports our draft as a plain Llama that any engine reads: `python -m benchmarks.peers.draft_export DIRECTORY`.

Our draft has 8-bit weights, and a head for some tokens only. The export is in bfloat16, and its head has a row for
every token, with zeros for the missing ones. Their logit is 0, far below the largest of the others.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from outrider.engine import resolve
from outrider.engine.checkpoints import checkpoints
from outrider.engine.loading.draft_checkpoint import load_draft_model
from safetensors.torch import save_file
from torch import Tensor

DRAFT = "smollm2-135m-draft"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def full_head(rows: Tensor, token_map: Tensor, vocab_size: int) -> Tensor:
    """Places a head's rows at their token ids → [vocab_size, width]."""
    head = torch.zeros(vocab_size, rows.shape[1], dtype=rows.dtype)
    head[token_map] = rows
    return head


def export(draft: Path, directory: Path) -> Path:
    """Writes the checkpoint atomically. One that is newer than the draft is used again."""
    if _is_newer(directory / "config.json", draft / "config.json"):
        return directory
    model, token_map = load_draft_model(draft, torch.bfloat16)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    weights["lm_head.weight"] = full_head(weights["lm_head.weight"], token_map, model.config.vocab_size)
    scratch = directory.with_suffix(".part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
    settings = checkpoints.read_config(draft)
    (scratch / "config.json").write_text(json.dumps(plain_config(settings), indent=2, sort_keys=True) + "\n")
    base = resolve(settings["outrider_draft"]["base"])
    for name in _TOKENIZER:
        if (base / name).exists():
            shutil.copy(base / name, scratch / name)
    shutil.rmtree(directory, ignore_errors=True)
    return scratch.rename(directory)


def plain_config(settings: dict[str, Any]) -> dict[str, Any]:
    """The config of an ordinary Llama in bfloat16, with an untied head."""
    kept = {name: value for name, value in settings.items() if name != "outrider_draft"}
    return {**kept, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "tie_word_embeddings": False}


def _is_newer(file: Path, than: Path) -> bool:
    return file.exists() and file.stat().st_mtime > than.stat().st_mtime


if __name__ == "__main__":
    print(export(resolve(DRAFT), Path(sys.argv[1])))
