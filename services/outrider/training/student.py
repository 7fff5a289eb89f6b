"""The student: a few of the target's own layers on the target's embedding, with a head for the commonest tokens.

Starting from the target's layers is far better than random initialisation. Sharing embedding and head rows keeps the
student small on disk and consistent with the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.engine import CheckpointError
from outrider.engine.backends.cpu import multiplies_bfloat16
from outrider.engine.checkpoints import read_config
from outrider.engine.draft_checkpoint import build_draft_model, read_embedding, read_head
from outrider.training.corpus import Sample

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

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers: at least one")
        if self.head_tokens < 1:
            raise ValueError("head_tokens: must be at least 1")


def compute_dtype() -> torch.dtype:
    """In which this machine multiplies fastest. A CPU without instructions for bfloat16 emulates it, at a twelfth of
    the speed of float32."""
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32


def commonest_tokens(samples: Sequence[Sample], vocab_size: int, count: int) -> Tensor:
    """[count] ids in ascending order; among equally common ones the lower, which BPE merged earlier."""
    counts = torch.zeros(vocab_size)
    for sample in samples:
        counts += torch.bincount(sample.token_ids.long(), minlength=vocab_size)
    order = (counts - torch.arange(vocab_size) * 1e-7).argsort(descending=True)
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
    for file in sorted(target.glob("*.safetensors")):
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


@dataclass(slots=True)
class Scores:
    """Sums over tokens."""

    loss: float = 0.0
    """KL(target ‖ student) over the head's tokens, nats, weighted."""
    weight: float = 0.0
    agreed: int = 0
    """Answer tokens at which student and target have the same argmax."""
    answers: int = 0

    def add(self, other: Scores) -> None:
        self.loss += other.loss
        self.weight += other.weight
        self.agreed += other.agreed
        self.answers += other.answers

    @property
    def mean_loss(self) -> float:
        return self.loss / max(self.weight, 1e-9)

    @property
    def agreement(self) -> float:
        return self.agreed / max(self.answers, 1)


def hidden_states(model: LlamaForCausalLM, samples: Sequence[Sample]) -> Tensor:
    """The input of the student's head at every position of the samples, [sum of (tokens - 1), width]."""
    lengths = [len(sample.hidden) for sample in samples]
    ids = torch.zeros(len(samples), max(lengths), dtype=torch.long)
    for row, sample in enumerate(samples):
        ids[row, : lengths[row]] = sample.token_ids[:-1]
    # Padding is at the end, where no real position of a causal model attends to it.
    dtype = compute_dtype()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        out = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return torch.cat([out[row, :length] for row, length in enumerate(lengths)])


def learn(student: Tensor, samples: Sequence[Sample], head: Tensor, full_head: Tensor | None = None) -> Scores:
    """Scores the student's hidden states. When they require a gradient, also back-propagates the loss through them.

    student [rows, width]; head [head tokens, width] is the target's rows that the student's head covers. The loss is
    the KL divergence of the full distribution over those tokens. `full_head` [vocab, width], when given, lets the
    target's argmax be any token, as in serving.
    """
    train = student.requires_grad
    seen = student.detach().requires_grad_(train)
    hidden = torch.cat([sample.hidden for sample in samples]).to(head.dtype)
    answers = torch.cat([sample.answers for sample in samples])
    weights = torch.where(answers, 1.0, _USER_WEIGHT)
    scores = Scores(weight=float(weights.sum()), answers=int(answers.sum()))
    for start in range(0, len(seen), _CHUNK):
        rows = slice(start, start + _CHUNK)
        with torch.no_grad():
            target = torch.log_softmax((hidden[rows] @ head.T).float(), -1)
        guess = torch.log_softmax((seen[rows].to(head.dtype) @ head.T).float(), -1)
        divergence = F.kl_div(guess, target, log_target=True, reduction="none").sum(-1)
        loss = (divergence * weights[rows]).sum() / scores.weight
        if train:
            loss.backward()  # type: ignore[no-untyped-call]
        scores.loss += loss.item() * scores.weight
        scores.agreed += _agreed(guess, target, hidden[rows], head, full_head, answers[rows])
    if train:
        student.backward(seen.grad)  # type: ignore[no-untyped-call]
    return scores


def _agreed(
    guess: Tensor, target: Tensor, hidden: Tensor, head: Tensor, full_head: Tensor | None, answers: Tensor
) -> int:
    same = guess.argmax(-1) == target.argmax(-1)
    if full_head is not None:
        with torch.no_grad():
            inside = (hidden @ head.T).amax(-1) >= (hidden @ full_head.T).amax(-1)
        same &= inside
    return int((same & answers).sum())
