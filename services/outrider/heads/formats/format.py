"""What a kind of head is known by, and how its files become a module. Each kind registers its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from outrider.heads.interface import TargetParts

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OurHead:
    """A head that `outrider distill` has written, but for its kind."""

    path: Path
    config: Config
    about: Mapping[str, Any]
    """Of config.json the field `outrider_head`."""
    tensors: Mapping[str, Tensor]
    token_map: Tensor | None
    taps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadFormat:
    kind: str
    knows: Callable[[Config, Path], bool]
    """Whether the directory, with this config.json, holds a published head of the kind."""
    read: Callable[[Path, Config, TargetParts], nn.Module]
    """A published head. Raises HeadError."""
    build: Callable[[OurHead, TargetParts], nn.Module]
    """A head of ours, whose tensors are filled in later. Raises HeadError."""


FORMATS: dict[str, HeadFormat] = {}
"""By kind, in the order in which they are asked whether they know a directory."""


def register(one: HeadFormat) -> None:
    FORMATS[one.kind] = one


def architectures(config: Config) -> str:
    """The names by which a published head calls itself, in lower case."""
    return " ".join([*(config.get("architectures") or []), str(config.get("speculators_model_type", ""))]).lower()
