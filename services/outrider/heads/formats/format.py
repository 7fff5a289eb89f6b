"""What a kind of head is known by, and how its files become a module. Each kind registers its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from outrider.heads.interface import TargetParts

Config = dict[str, Any]

_FULL = "full_attention"


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


def unserved(config: Config, inner: Config, layers: int | None = None, **usual: Any) -> Iterator[tuple[str, Any]]:
    """Fields of heads that compute something else: of the first layers kinds that do not see the whole text, and the
    fields of either config that differ from the usual ones."""
    yield from (("layer_types", kind) for kind in (config.get("layer_types") or ())[:layers] if kind != _FULL)
    stated = {name: inner.get(name, config.get(name, value)) for name, value in usual.items()}
    yield from ((name, stated[name]) for name, value in usual.items() if stated[name] != value)
