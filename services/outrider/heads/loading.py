"""Reads heads: those of the field's formats, of which each kind registers its own (`formats/`), and ours. A tensor that
does not fit is refused by its name, and a pickle unread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.checkpoint_files import read_json
from outrider.engine.checkpoints.checkpoints import read_config
from outrider.engine.loading.draft_checkpoint import read_embedding, read_head
from outrider.heads.formats import FORMATS, OurHead
from outrider.heads.interface import DraftHead, HeadError, TargetParts
from outrider.heads.tensors import fill, read_tensors, tensor_names

OURS = "ours"
"""What `outrider distill` writes, whatever its kind."""
FORMAT = 1


def load_head(path: Path, target: TargetParts, dtype: torch.dtype = torch.bfloat16) -> DraftHead:
    """The head in a directory, for this target. Raises HeadError."""
    config = read_head_config(path)
    kind = head_kind(config, path)
    head: Any = _load_ours(path, config, target) if kind == OURS else FORMATS[kind].read(path, config, target)
    return head.to(dtype).eval().requires_grad_(False)  # type: ignore[no-any-return]


def load_head_of(model: Path, head: Path, device: str) -> tuple[DraftHead, TargetParts]:
    """The head in `head` for the checkpoint in `model`, and what it shares with it. Raises HeadError."""
    settings = read_config(model)
    layers = int(settings.get("text_config", settings)["num_hidden_layers"])
    parts = TargetParts(read_embedding(model), read_head(model), layers)
    # A CPU's kernels round what is stored in 8 bits to the same numbers again, but not from bfloat16.
    loaded: Any = load_head(head, parts, torch.float32 if device == "cpu" else torch.bfloat16)
    return loaded.to(device), parts


def read_head_config(path: Path) -> dict[str, Any]:
    """config.json, where speculators' configs are flattened to the form of the others. Raises HeadError."""
    file = path / "config.json"
    try:
        config = read_json(file)
    except (OSError, ValueError) as error:
        raise HeadError(str(file), str(error)) from None
    if "speculators_model_type" in config:
        # Its layers are described apart, and its residual is normalised unless it says otherwise.
        config = {**config.get("transformer_layer_config", {}), "norm_before_residual": True, **config}
    return config


def is_head(path: Path) -> bool:
    """Whether the directory holds a head, not a model of its own."""
    try:
        return bool(head_kind(read_head_config(path), path))
    except HeadError:
        return False


def head_kind(config: dict[str, Any], path: Path) -> str:
    """OURS, or a kind of FORMATS. Raises HeadError for anything else."""
    if "outrider_head" in config:
        return OURS
    for one in FORMATS.values():
        if one.knows(config, path):
            return one.kind
    if not tensor_names(path):
        # Says that they are pickled, or missing.
        read_tensors(path, lambda name: name)
    named = {name: config[name] for name in ("architectures", "model_type", "speculators_model_type") if name in config}
    raise HeadError(f"{path}/config.json", f"not a known draft head ({named}), which are {', '.join(FORMATS)}")


def _load_ours(path: Path, config: dict[str, Any], target: TargetParts) -> nn.Module:
    about, file = config["outrider_head"], f"{path}/config.json"
    if about.get("format") != FORMAT:
        raise HeadError(file, f"head format {about.get('format')!r}, this version reads {FORMAT}")
    if (known := FORMATS.get(about.get("kind"))) is None:
        raise HeadError(file, f"outrider_head.kind {about.get('kind')!r} is none of {', '.join(FORMATS)}")
    tensors = read_tensors(path, lambda name: name)
    token_map = tensors.pop("token_map").long() if "token_map" in tensors else None
    taps = tuple(about.get("taps") or ())
    if any(not 0 <= tap <= target.layers for tap in taps):
        raise HeadError(file, f"outrider_head.taps {taps}: the target has {target.layers} layers")
    head = known.build(OurHead(path, config, about, tensors, token_map, taps), target)
    shared = {name: value for name, value in head.state_dict().items() if name.startswith(("embed_", "lm_head"))}
    fill(head, {**shared, **tensors})
    return head
