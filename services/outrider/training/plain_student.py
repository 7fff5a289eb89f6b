"""Any model with the target's vocabulary as a student: all of it learns, and it stays an ordinary checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engine import CheckpointError
from outrider.engine.loading.draft_checkpoint import write_recipe
from outrider.training.shards import Sample
from outrider.training.student import Scores, TeacherHead, hidden_states, learn

_TOLERANCE = 0.03


class PlainLearner:
    """A checkpoint that transformers loads."""

    kind = "model"

    def __init__(self, target: Path, student: Path, device: str) -> None:
        """`student` has the target's tokens. Raises CheckpointError where its logits are not its head's product."""
        from transformers import AutoModelForCausalLM

        self._path = student
        self.module: Any = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32, local_files_only=True)
        self.module.to(device)
        self.learnable: list[Tensor] = [p for p in self.module.parameters() if p.requires_grad]
        self._head = TeacherHead(target, None, device)
        # One of them may be padded.
        self._width = min(len(self._head.rows), len(self._own))
        self._head.rows = self._head.rows[: self._width]
        self._check()

    @property
    def _own(self) -> Tensor:
        weight: Tensor = self.module.get_output_embeddings().weight
        return weight

    def _check(self) -> None:
        with torch.no_grad():
            ids = torch.arange(16, device=self._own.device)[None] % self._width
            logits = self.module(input_ids=ids, use_cache=False).logits[0]
            hidden = self.module.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
            difference = float((hidden @ self._own.T - logits).norm() / logits.norm())
        if not difference < _TOLERANCE:
            raise CheckpointError(str(self._path), "its logits are not its last hidden state times its vocabulary head")

    def score(self, samples: Sequence[Sample]) -> Scores:
        return learn(hidden_states(self.module, samples), samples, self._head, self._own[: self._width])

    def save(self, out: Path, base: str, recipe: dict[str, Any]) -> None:
        """The student's own files with new weights, in bfloat16."""
        self.module.cpu().to(torch.bfloat16).save_pretrained(out)
        for file in self._path.glob("*"):
            kept = file.suffix in (".json", ".jinja", ".model") and "safetensors" not in file.name
            if kept and not (out / file.name).exists():
                shutil.copy(file, out / file.name)
        write_recipe(out, recipe)
