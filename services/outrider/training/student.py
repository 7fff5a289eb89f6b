"""The student: a few of the target's own layers on the target's embedding, with a head for the commonest tokens.

Starting from the target's layers is far better than random initialisation. Sharing embedding and head rows keeps the
student small on disk and consistent with the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.checkpoint_files import weight_files
from outrider.engine import CheckpointError
from outrider.engine.backends.cpu import multiplies_bfloat16
from outrider.engine.checkpoints.checkpoints import read_config
from outrider.engine.loading.draft_checkpoint import (
    build_draft_model,
    load_draft_model,
    read_embedding,
    read_head,
    save_draft_model,
)
from outrider.training.shards import Sample

# Rows of logits held at once, which bounds memory: several float32 tensors [rows, head].
_CHUNK = 1024
# Weight of user turns: worth learning too, but only answers are drafted.
_USER_WEIGHT = 0.4


@dataclass(frozen=True, slots=True)
class StudentConfig:
    """The draft's shape."""

    layers: tuple[int, ...] = (0, 1, 2, -1)
    """Indices of the target's layers it starts from, in order; negative ones count from the end."""
    head_tokens: int = 8192
    """Number of tokens its head covers: the commonest of the corpus."""
    taps: tuple[int, ...] = ()
    """Layers whose states a head reads, numbered as in the engine's Taps; empty: those that its kind reads."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers: at least one")
        if self.head_tokens < 1:
            raise ValueError("head_tokens: must be at least 1")


def compute_dtype(device: str = "cpu") -> torch.dtype:
    """In which this machine multiplies fastest. A CPU without instructions for bfloat16 emulates it, at a twelfth of
    the speed of float32."""
    quick = torch.cuda.is_bf16_supported() if device.startswith("cuda") else multiplies_bfloat16()
    return torch.bfloat16 if quick else torch.float32


def mixed_precision(device: str) -> torch.autocast:
    """Matrices are multiplied in compute_dtype; weights and sums stay in float32."""
    dtype = compute_dtype(device)
    return torch.autocast(device.split(":")[0], dtype=dtype, enabled=dtype != torch.float32)


def commonest_tokens(counts: Tensor, count: int) -> Tensor:
    """counts [vocab] → [count] ids in ascending order; among equally common ones the lower, which BPE merged
    earlier."""
    order = (counts - torch.arange(len(counts)) * 1e-7).argsort(descending=True)
    return order[:count].sort().values


def build_student(target: Path, config: StudentConfig, token_map: Tensor) -> LlamaForCausalLM:
    """A float32 student with the target's layers. Raises CheckpointError when the target is no Llama."""
    settings = read_config(target)
    if settings.get("model_type") != "llama":
        raise CheckpointError(
            f"{target}/config.json", f"model_type {settings.get('model_type')!r}: only llama is known"
        )
    depth = int(settings["num_hidden_layers"])
    picked = [layer % depth for layer in config.layers]
    for name in ("architectures", "transformers_version", "torch_dtype", "dtype", "layer_types"):
        settings.pop(name, None)
    settings["num_hidden_layers"] = len(picked)
    embedding, head = read_embedding(target).float(), read_head(target).float()
    model = build_draft_model(LlamaConfig(**settings), embedding, token_map, head)
    model.set_attn_implementation("sdpa")
    stored: dict[str, Tensor] = {}
    for file in weight_files(target):
        stored.update(load_file(file))
    weights = {"norm.weight": stored["model.norm.weight"].float()}
    for number, layer in enumerate(picked):
        prefix = f"model.layers.{layer}."
        for name, value in stored.items():
            if name.startswith(prefix):
                weights[f"layers.{number}.{name.removeprefix(prefix)}"] = value.float()
    model.model.load_state_dict(weights, strict=False)
    model.model.embed_tokens.weight.requires_grad_(False)
    return model


def as_student(draft: Path) -> LlamaForCausalLM:
    model, _ = load_draft_model(draft, torch.float32)
    model.set_attn_implementation("sdpa")
    model.model.embed_tokens.weight.requires_grad_(False)
    return model


@dataclass(slots=True)
class Scores:
    """Sums over tokens."""

    loss: float = 0.0
    """KL(target ‖ student) over the head's tokens, nats, weighted."""
    weight: float = 0.0

    def add(self, other: Scores) -> None:
        self.loss += other.loss
        self.weight += other.weight

    @property
    def mean_loss(self) -> float:
        return self.loss / max(self.weight, 1e-9)


class ModelLearner:
    """A draft model as it is trained: the student above."""

    kind = "model"

    def __init__(
        self, target: Path, config: StudentConfig, token_map: Tensor, device: str, start: Path | None = None
    ) -> None:
        """start: a draft of the target that it begins as."""
        made = build_student(target, config, token_map) if start is None else as_student(start)
        self.module = made.to(device)
        self.token_map = token_map
        self.learnable = [p for p in self.module.model.parameters() if p.requires_grad]
        self._head = TeacherHead(target, token_map, device)

    def score(self, samples: Sequence[Sample]) -> Scores:
        return learn(hidden_states(self.module, samples), samples, self._head)

    def save(self, out: Path, base: str, recipe: dict[str, Any]) -> None:
        save_draft_model(out, self.module.cpu(), self.token_map, base=base, recipe=recipe)


def hidden_states(model: Any, samples: Sequence[Sample]) -> Tensor:
    """The input of the student's head at every position of the samples, [sum of (tokens - 1), width]."""
    lengths = [len(sample.hidden) for sample in samples]
    ids = torch.zeros(len(samples), max(lengths), dtype=torch.long)
    for row, sample in enumerate(samples):
        ids[row, : lengths[row]] = sample.token_ids[:-1]
    # Padding is at the end, where no real position of a causal model attends to it.
    with mixed_precision(model.device.type):
        out = model.base_model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
    return torch.cat([out[row, :length] for row, length in enumerate(lengths)])


class TeacherHead:
    """The rows of the target's vocabulary head that a student has."""

    def __init__(self, target: Path, token_map: Tensor | None, device: str) -> None:
        """token_map [head tokens]; None: all."""
        full = read_head(target)
        self.rows = (full if token_map is None else full[token_map]).to(device, compute_dtype(device))


def learn(student: Tensor, samples: Sequence[Sample], head: TeacherHead, own: Tensor | None = None) -> Scores:
    """Scores the student's hidden states [rows, width]. When they require a gradient, also back-propagates the loss
    through them. `own` [head tokens, student's width]: the student's head, if it is not the target's."""
    hidden = torch.cat([sample.hidden for sample in samples])
    scores, gradient = compare(student, hidden, torch.cat([sample.answers for sample in samples]), head, own)
    if gradient is not None:
        student.backward(gradient)  # type: ignore[no-untyped-call]
    return scores


def compare(
    student: Tensor, hidden: Tensor, answers: Tensor, head: TeacherHead, own: Tensor | None = None
) -> tuple[Scores, Tensor | None]:
    """Scores the student's states against the target's, both [rows, width]; answers [rows].

    The loss is the KL divergence of the full distribution over the tokens that the student's head has. Also returns its
    gradient, if the student's states require one: the logits of all rows at once would not fit into memory.
    """
    train = student.requires_grad
    seen = student.detach().requires_grad_(train)
    rows, device = head.rows, seen.device
    hidden, answers = hidden.to(device, rows.dtype), answers.to(device)
    weights = torch.where(answers, 1.0, _USER_WEIGHT)
    scores = Scores(weight=float(weights.sum()))
    for start in range(0, len(seen), _CHUNK):
        part = slice(start, start + _CHUNK)
        with torch.no_grad():
            target = torch.log_softmax((hidden[part] @ rows.T).float(), -1)
        guess = torch.log_softmax(
            (seen[part].to(rows.dtype) @ (rows if own is None else own.to(rows.dtype)).T).float(), -1
        )
        divergence = F.kl_div(guess, target, log_target=True, reduction="none").sum(-1)
        loss = (divergence * weights[part]).sum() / scores.weight
        if train:
            loss.backward()  # type: ignore[no-untyped-call]
        scores.loss += loss.item() * scores.weight
    return scores, seen.grad


def read_layers(target: Path, numbers: Sequence[int]) -> tuple[list[dict[str, Tensor]], Tensor]:
    """The tensors of each layer, by their names in it, and the final norm. Raises CheckpointError."""
    found: dict[str, Tensor] = {}
    wanted = tuple(f"layers.{number}." for number in numbers)
    for file in weight_files(target):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - safe_open is no mapping
                short = name.removeprefix("model.")
                if short == "norm.weight" or short.startswith(wanted):
                    found[short] = stored.get_tensor(name)
    layers = []
    for number in numbers:
        prefix = f"layers.{number}."
        layer = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
        if not layer:
            raise CheckpointError(f"{target}", f"no tensors model.{prefix}*: only Llama-like targets are known")
        layers.append(layer)
    if "norm.weight" not in found:
        raise CheckpointError(f"{target}", "no tensor model.norm.weight: only Llama-like targets are known")
    return layers, found["norm.weight"]
