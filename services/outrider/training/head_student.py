"""Heads as they are trained: on the target's states, and then on their own, as in drafting (EAGLE-3's training-time
test).

Position i of a text is an anchor. Step 0 reads the target's state of i and token i + 1; step s reads the output of step
s - 1 and token i + 1 + s, which the text gives. Each is compared with the target's state at the token that it read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.engine import CheckpointError
from outrider.engine.checkpoints.checkpoints import read_config
from outrider.engine.checkpoints.quantization import quantize_rows
from outrider.engine.loading.draft_checkpoint import (
    load_draft_model,
    read_embedding,
    read_head,
    rounding_noise,
    write_recipe,
)
from outrider.heads import Eagle3Head, HeadError, MedusaHead, MtpHead, TargetParts, load_head
from outrider.heads.eagle import EagleVariant, default_taps
from outrider.heads.interface import HeadSettings
from outrider.heads.loading import FORMAT, is_head
from outrider.heads.tensors import settings_of
from outrider.training.shards import Sample
from outrider.training.student import Scores, StudentConfig, TeacherHead, compare, mixed_precision, read_layers

_STEPS = 3
# One batch in so many is learnt in all steps, the others in the first: it decides most, and costs a third.
_UNROLLED_ONE_IN = 3
_BLOCKS = 3
# Of the loss of a step against that of the one before: later tokens are drafted less often.
_FADE = 0.8
_SHARED = ("embed_tokens.", "lm_head.", "lm_heads.")


def taps_of_start(start: Path) -> tuple[int, ...]:
    """The layers that this head reads; none of a draft model. Raises CheckpointError for a head that no other begins
    as."""
    about = read_config(start).get("outrider_head", {})
    if is_head(start) and about.get("kind") != "mtp":
        raise CheckpointError("start", f"{start} is not an MTP head made by outrider distill")
    return tuple(about.get("taps", ()))


def taps_of(kind: str, config: StudentConfig, target: Path) -> tuple[int, ...]:
    """Layers whose states a corpus has to keep for this head. Raises ValueError for those that the target lacks."""
    layers = _depth(target)
    if any(not 0 <= tap <= layers for tap in config.taps):
        raise ValueError(f"taps: {config.taps}, and the target has {layers} layers")
    own = KINDS[kind].default_taps if kind in KINDS else None
    return config.taps or (() if own is None else own(layers))


@dataclass(slots=True)
class UnrolledMemory:
    """Attention of all anchors at once: to the anchors before and itself as of step 0, and to its own later steps."""

    steps: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        known = self.steps.setdefault(layer, [])
        known.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
        (first_key, first_value), *own = known
        if not own:
            return nn.functional.scaled_dot_product_attention(query, first_key, first_value, is_causal=True)
        scale = float(query.shape[-1]) ** -0.5
        scores = (query @ first_key.transpose(-1, -2)).float()
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        chain = torch.stack([(query * each).sum(-1) for each, _ in own], -1).float()
        weights = torch.cat([scores.masked_fill(later, -torch.inf), chain], -1).mul(scale).softmax(-1).to(value.dtype)
        out = weights[..., : -len(own)] @ first_value
        for number, (_, each) in enumerate(own):
            out = out + weights[..., first_key.shape[2] + number, None] * each
        return out


class HeadLearner:
    """A head of one of KINDS, beside the target's vocabulary head, which it shares."""

    def __init__(
        self, kind: str, target: Path, config: StudentConfig, token_map: Tensor | None, device: str, start: Path | None
    ) -> None:
        """start: a draft or an MTP head that `outrider distill` made for the target, with this token map; an MTP head
        begins as it."""
        self.kind = kind
        self.token_map = token_map
        parts = TargetParts(read_embedding(target).float(), read_head(target).float(), _depth(target))
        self.module: Any = KINDS[kind].build(target, parts, config, token_map, start).to(device)
        for name, value in self.module.named_parameters():
            value.requires_grad_(not name.startswith(_SHARED))
        self.learnable = [value for value in self.module.parameters() if value.requires_grad]
        self._head = TeacherHead(target, token_map, device)
        self._device = device
        self._learnt = 0

    def score(self, samples: Sequence[Sample]) -> Scores:
        """The loss is that of the first step."""
        batch = _Batch.of([s for s in samples if len(s.token_ids) > _STEPS + 1], self._device)
        with mixed_precision(self._device):
            outs = self._unrolled(batch, self._steps()) if self.module.recurrent else self._blocks(batch)
        total, gradients = Scores(), []
        for step, out in enumerate(outs):
            valid = batch.valid(step)
            scores, gradient = compare(
                out[valid], batch.ahead(batch.hidden, step)[valid], batch.answers_at(step), self._head
            )
            if not step:
                total.add(scores)
            if gradient is not None:
                gradients.append(torch.zeros_like(out).masked_scatter(valid[..., None], gradient * _FADE**step))
        if gradients:
            torch.autograd.backward(outs, gradients)
        return total

    def _steps(self) -> int:
        if not torch.is_grad_enabled():
            return 1
        self._learnt += 1
        return 1 if self._learnt % _UNROLLED_ONE_IN else _STEPS

    def _unrolled(self, batch: _Batch, steps: int = _STEPS) -> list[Tensor]:
        memory, outs = UnrolledMemory(), []
        features = self.module.features(batch.states[:, : batch.anchors])
        for step in range(steps):
            features, out = self.module(batch.tokens(step), features, batch.positions + step, memory)
            outs.append(out)
        return outs

    def _blocks(self, batch: _Batch) -> list[Tensor]:
        states = batch.states[:, : batch.anchors]
        return [block(states) for block in self.module.blocks]

    def save(self, out: Path, base: str, recipe: dict[str, Any]) -> None:
        """config.json, head.safetensors in 8 bits without what the target has, and recipe.json."""
        tensors: dict[str, Tensor] = {}
        noise = rounding_noise()
        for name, value in self.module.cpu().state_dict().items():
            if name.startswith(_SHARED):
                continue
            if value.dim() == 2:
                tensors[name], tensors[f"{name}.scale"] = quantize_rows(value, torch.float16, noise)
            else:
                tensors[name] = value.to(torch.bfloat16)
        if self.token_map is not None:
            tensors["token_map"] = self.token_map.to(torch.int32)
        out.mkdir(parents=True, exist_ok=True)
        save_file(tensors, out / "head.safetensors")
        about = {"format": FORMAT, "kind": self.kind, "base": base, "taps": list(self.module.taps)}
        about["early"] = getattr(self.module, "early", 0)
        config = {**self.module.shape, "outrider_head": about}
        (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        write_recipe(out, recipe)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Texts side by side, padded at their ends."""

    token_ids: Tensor
    """[texts, longest]"""
    states: Tensor
    """[texts, longest - 1, taps · width]: what the head reads."""
    hidden: Tensor
    """[texts, longest - 1, width]: the inputs of the target's head."""
    answers: Tensor
    lengths: Tensor
    """Of `hidden`, of each text."""

    @classmethod
    def of(cls, samples: Sequence[Sample], device: str) -> _Batch:
        def padded(parts: list[Tensor]) -> Tensor:
            return nn.utils.rnn.pad_sequence(parts, batch_first=True).to(device)

        return cls(
            padded([s.token_ids.long() for s in samples]),
            padded([s.states.float() for s in samples]),
            padded([s.hidden for s in samples]),
            padded([s.answers for s in samples]),
            torch.tensor([len(s.hidden) for s in samples], device=device),
        )

    @property
    def anchors(self) -> int:
        return self.hidden.shape[1] - _STEPS

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.anchors, device=self.hidden.device).expand(len(self.hidden), -1)

    def tokens(self, step: int) -> Tensor:
        return self.token_ids[:, step + 1 : step + 1 + self.anchors]

    def ahead(self, values: Tensor, step: int) -> Tensor:
        """The values at the token that each anchor reads in this step."""
        return values[:, step + 1 : step + 1 + self.anchors]

    def valid(self, step: int) -> Tensor:
        """[texts, anchors]: where the text has the token that is to be guessed."""
        return self.positions + step + 1 < self.lengths[:, None]

    def answers_at(self, step: int) -> Tensor:
        return self.ahead(self.answers, step)[self.valid(step)]


def _depth(target: Path) -> int:
    return int(read_config(target)["num_hidden_layers"])


def _settings(target: Path, layers: int) -> tuple[HeadSettings, dict[str, Any]]:
    """The target's own shape with so many layers, and as config.json has it."""
    names = (
        "model_type hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps "
        "rope_theta rope_scaling rope_parameters max_position_embeddings attention_bias "
        "original_max_position_embeddings"
    )
    config = read_config(target)
    shape = {name: config[name] for name in names.split() if config.get(name) is not None}
    shape["num_hidden_layers"] = layers
    try:
        return settings_of(shape, target, ours=True), shape
    except HeadError as error:
        raise CheckpointError("target", str(error)) from error


def _mtp(target: Path, parts: TargetParts, config: StudentConfig, token_map: Tensor | None, start: Path | None) -> Any:
    if start is not None and is_head(start):
        return _going_on(start, parts)
    if start is not None:
        model, _ = load_draft_model(start, torch.float32)
        layers = [layer.state_dict() for layer in model.model.layers]
        norm, early = model.model.norm.weight.detach(), len(layers) - 1
    else:
        layers, norm = read_layers(target, [layer % parts.layers for layer in config.layers])
        early = 0
    settings, shape = _settings(target, len(layers))
    head: Any = MtpHead(settings, parts, token_map, norms_tokens=False, early=early, taps=config.taps)
    for layer, weights in zip(head.layers, layers, strict=True):
        layer.load_state_dict({name: value.float() for name, value in weights.items()})
    head.norm.weight.data.copy_(norm)
    # Begins as the model of its layers, which sees no state.
    head.eh_proj.weight.data.copy_(torch.cat([torch.eye(parts.width), torch.zeros(parts.width, parts.width)], 1))
    if head.taps:
        head.fc.weight.data.copy_(_highest(head.taps, parts.width))
    head.shape = shape
    return head


def _going_on(start: Path, parts: TargetParts) -> Any:
    try:
        head: Any = load_head(start, parts, torch.float32)
    except HeadError as error:
        raise CheckpointError("start", str(error)) from error
    head.shape = {name: value for name, value in read_config(start).items() if name != "outrider_head"}
    return head


def _eagle(
    target: Path, parts: TargetParts, config: StudentConfig, token_map: Tensor | None, start: Path | None
) -> Any:
    """Begins as the target's last layer on the highest tap; the token's half of attention begins at nothing."""
    settings, shape = _settings(target, 1)
    [weights], norm = read_layers(target, [parts.layers - 1])
    rows = parts.head if token_map is None else parts.head[token_map]
    variant = EagleVariant(config.taps or default_taps(parts.layers), parts.width, len(rows), fc_norm=True)
    head: Any = Eagle3Head(settings, variant, parts, token_map)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = weights[f"self_attn.{name}.weight"]
        weights[f"self_attn.{name}.weight"] = torch.cat([torch.zeros_like(weight), weight], 1)
    weights["hidden_norm.weight"] = weights["input_layernorm.weight"]
    head.layers[0].load_state_dict({name: value.float() for name, value in weights.items()})
    head.norm.weight.data.copy_(norm)
    head.fc.weight.data.copy_(_highest(variant.taps, parts.width))
    head.lm_head.weight = nn.Parameter(rows.clone())
    head.shape = shape
    return head


def _highest(taps: tuple[int, ...], width: int) -> Tensor:
    """[width, taps · width]: the last of the states, as it is."""
    return torch.cat([*[torch.zeros(width, width)] * (len(taps) - 1), torch.eye(width)], 1)


def _medusa(
    target: Path, parts: TargetParts, config: StudentConfig, token_map: Tensor | None, start: Path | None
) -> Any:
    """Each block begins as the identity."""
    head: Any = MedusaHead(parts, _BLOCKS, token_map=token_map)
    for block in head.blocks:
        for value in block.parameters():
            nn.init.zeros_(value)
    head.shape = {"hidden_size": parts.width}
    return head


@dataclass(frozen=True, slots=True)
class LearnableHead:
    """A kind of head that `outrider distill` makes."""

    build: Callable[[Path, TargetParts, StudentConfig, Tensor | None, Path | None], Any]
    default_taps: Callable[[int], tuple[int, ...]] | None = None
    """The layers that it reads of a target with so many, if no others are asked for; without, what the target's
    vocabulary head reads."""
    reads_layers: bool = False
    """Whether others may be asked for."""
    starts: bool = False
    """Whether it may begin as another draft."""


KINDS = {
    "mtp": LearnableHead(_mtp, reads_layers=True, starts=True),
    "eagle3": LearnableHead(_eagle, default_taps, reads_layers=True),
    "medusa": LearnableHead(_medusa),
}
