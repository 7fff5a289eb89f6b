"""Low-rank adapters of a model (Hu et al. 2021) in peft's format. What a module makes of x, an adapter changes to
W x + B A x · alpha / rank. Knows files and tensors; not which sequence has which adapter."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.checkpoint_files import read_json
from outrider.engine.checkpoints.checkpoints import CheckpointError
from outrider.engine.checkpoints.digests import file_digest

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
# What changes the formula, by peft's name for it, with the value that does not.
_PLAIN = {"peft_type": "LORA", "bias": "none", "use_dora": False, "fan_in_fan_out": False}
_EMPTY = (
    *("modules_to_save", "rank_pattern", "alpha_pattern", "trainable_token_indices", "target_parameters"),
    # Which layers the model has, and of which tokens the formula is.
    *("layer_replication", "alora_invocation_tokens"),
)


@dataclass(frozen=True, slots=True)
class Adapter:
    """One that is empty changes nothing."""

    matrices: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By the module's name in the model: A [rank, inputs], and B [outputs, rank] times alpha / rank; float32."""


class Adaptable(Protocol):
    """A decoder that can apply adapters."""

    of_tokens: Tensor | None
    """[tokens] int64 of the next step: each token's adapter, or -1; None: no token has one."""

    def adapt(self, adapters: Sequence[Adapter]) -> None:
        """From now on it has these. Raises CheckpointError, with nothing changed, for one that does not fit."""
        ...


def is_adapter(path: Path) -> bool:
    return (path / _CONFIG).is_file()


def adapter_revision(path: Path) -> str:
    """A hash of its files."""
    digest = hashlib.sha256((path / _CONFIG).read_bytes())
    digest.update(file_digest(path / _WEIGHTS))
    return digest.hexdigest()[:16]


def base_of(path: Path) -> str:
    """The model that an adapter was trained for, by name or path. Raises CheckpointError."""
    base = _read_config(path).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"{path}/{_CONFIG}", "base_model_name_or_path: names no model")
    return base


def read_adapter(path: Path) -> Adapter:
    """Raises CheckpointError."""
    config, file = _read_config(path), path / _WEIGHTS
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise CheckpointError(f"{path}/{_CONFIG}", f"r, lora_alpha: {rank!r} and {alpha!r}")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    try:
        stored: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(str(file), str(error)) from error
    found = {}
    for name in sorted(name for name in stored if name.endswith(_A)):
        a, b = stored.pop(name).float(), stored.pop(name.removesuffix(_A) + _B, torch.empty(0)).float()
        if a.ndim != 2 or len(a) != rank or b.ndim != 2 or b.shape[1] != rank:
            raise CheckpointError(str(file), f"{name}: [{rank}, inputs] and its {_B}, [outputs, {rank}], are wanted")
        found[name.removeprefix(_PREFIX).removesuffix(_A)] = a, b * scale
    if stored or not found:
        raise CheckpointError(str(file), f"{next(iter(stored), 'no tensor')}: is no part of a plain LoRA")
    return Adapter(found)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / _CONFIG
    try:
        config = read_json(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(str(file), str(error)) from error
    changed = [name for name, plain in _PLAIN.items() if config.get(name, plain) != plain]
    for name in (*changed, *(name for name in _EMPTY if config.get(name))):
        raise CheckpointError(str(file), f"{name}: {config[name]!r} is not supported")
    return config


def save_adapter(path: Path, matrices: Mapping[str, tuple[Tensor, Tensor]], *, base: str, alpha: float) -> None:
    """matrices: as in Adapter, with B as it was trained."""
    path.mkdir(parents=True, exist_ok=True)
    pairs = ((name, ending, one) for name, pair in matrices.items() for ending, one in zip((_A, _B), pair, strict=True))
    tensors = {_PREFIX + name + ending: one.detach().cpu().bfloat16().contiguous() for name, ending, one in pairs}
    save_file(tensors, path / _WEIGHTS)
    config = {
        **_PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": len(next(iter(matrices.values()))[0]),
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name in matrices}),
        "inference_mode": True,
    }
    (path / _CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


class AdaptedModules:
    """Applies adapters to the modules of a model, by hooks: on any device, one gather and two products a module."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._hooks: list[Any] = []

    def adapt(self, adapters: Sequence[Adapter], at: Adaptable) -> None:
        """`at` says which adapter each token has. Raises CheckpointError."""
        names = sorted({name for adapter in adapters for name in adapter.matrices})
        stacks = {name: self._stack(name, adapters) for name in names}
        for hook in self._hooks:
            hook.remove()
        self._hooks = [self._modules[name].register_forward_hook(_hook(at, *stacks[name])) for name in names]

    def _stack(self, name: str, adapters: Sequence[Adapter]) -> tuple[Tensor, Tensor]:
        """[adapters + 1, rank, inputs] and [adapters + 1, rank, outputs], filled up with zeros; the last are zeros."""
        module: Any = self._modules.get(name)
        sizes = getattr(module, "in_features", 0), getattr(module, "out_features", 0)
        pairs = [one.matrices.get(name) for one in adapters]
        rank = max(len(pair[0]) for pair in pairs if pair is not None)
        if any(pair is not None and (pair[0].shape[1], len(pair[1])) != sizes for pair in pairs):
            raise CheckpointError(name, f"the model has no such linear module, or one of {sizes} inputs and outputs")
        found = [torch.zeros(len(adapters) + 1, rank, size) for size in sizes]
        for number, pair in enumerate(pairs):
            if pair is not None:
                found[0][number, : len(pair[0])] = pair[0]
                found[1][number, : len(pair[0])] = pair[1].T
        a, b = (one.to(module.weight.device, module.weight.dtype) for one in found)
        return a, b


def _hook(at: Adaptable, a: Tensor, b: Tensor) -> Any:
    def add(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        if at.of_tokens is None:
            return out
        between = inputs[0].view(-1, 1, a.shape[2]) @ a[at.of_tokens].transpose(1, 2)
        return out + (between @ b[at.of_tokens]).view(out.shape)

    return add
