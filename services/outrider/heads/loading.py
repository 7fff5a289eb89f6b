"""Reads heads in the field's formats, and in ours. A tensor that does not fit is refused by its name, and a pickle
unread.

| kind | config.json | tensors |
|---|---|---|
| ours | `outrider_head` | those of the module, 8-bit matrices with `.scale`, `token_map` |
| eagle3 | any: known by its tensors; speculators_model_type eagle3 | fc, midlayer.* or layers.i.*, each with hidden_norm; norm, lm_head, d2t, t2d |
| medusa | architectures or model_type medusa, or medusa_num_heads | blocks.i.layers.j.*, lm_heads.i.*; or i.j.linear.*, i.n.* |
| mtp | a whole model's | DeepSeek: model.layers.N.{enorm, hnorm, eh_proj, shared_head.*, …}; Qwen: mtp.* |
"""  # noqa: E501

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.checkpoints.checkpoints import read_config
from outrider.engine.loading.draft_checkpoint import read_embedding, read_head
from outrider.heads.eagle import Eagle3Head, EagleVariant, default_taps
from outrider.heads.interface import DraftHead, HeadError, HeadSettings, TargetParts
from outrider.heads.medusa import MedusaHead
from outrider.heads.mtp import MtpHead
from outrider.heads.tensors import fill, read_tensors, settings_of, tensor_names

FORMAT = 1


def load_head(path: Path, target: TargetParts, dtype: torch.dtype = torch.bfloat16) -> DraftHead:
    """The head in a directory, for this target. Raises HeadError."""
    config = read_head_config(path)
    load = {"ours": _load_ours, "eagle3": _load_eagle, "medusa": _load_medusa, "mtp": _load_mtp}[
        head_kind(config, path)
    ]
    head: Any = load(path, config, target)
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
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise HeadError(str(file), str(error)) from None
    if not isinstance(config, dict):
        raise HeadError(str(file), "not a JSON object")
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
    """ours, eagle3, medusa or mtp. Raises HeadError for anything else."""
    names = " ".join([*(config.get("architectures") or []), str(config.get("speculators_model_type", ""))]).lower()
    if "outrider_head" in config:
        return "ours"
    # Heads are published under the names of many architectures, that of a whole Llama among them.
    if "eagle3" in names or _is_eagle(tensor_names(path)):
        return "eagle3"
    if "medusa" in names or config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return "medusa"
    named = any(key in config for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    # Qwen3-Next has such a layer and no field that says so.
    if named or config.get("model_type") == "qwen3_next":
        return "mtp"
    if not tensor_names(path):
        # Says that they are pickled, or missing.
        read_tensors(path, lambda name: name)
    raise HeadError(f"{path}/config.json", f"not a known draft head (architectures: {config.get('architectures')})")


def _is_eagle(names: Collection[str]) -> bool:
    ours = set(filter(None, map(_eagle_name, names)))
    return {"fc.weight", "layers.0.hidden_norm.weight"} <= ours


_EAGLE_LAYER = re.compile(r"(midlayer|layers|additional_layers)\.(?:(\d+)\.)?")


def _eagle_name(name: str) -> str | None:
    """A tensor's name among those of vLLM's module; None for a copy of the target's own."""
    name = re.sub(r"^(model|draft_model|eagle_module)\.", "", name)
    if layer := _EAGLE_LAYER.match(name):
        # SGLang counts the layers after the first apart.
        number = int(layer[2] or 0) + (layer[1] == "additional_layers")
        name = f"layers.{number}.{name[layer.end() :]}"
    return None if name.startswith("verifier_") or name.endswith("inv_freq") else name


def _eagle_tensors(path: Path) -> dict[str, Tensor]:
    tensors = read_tensors(path, _eagle_name)
    for name in [name for name in tensors if name.endswith(".hidden_norm.weight") and not name.startswith("layers.0.")]:
        # After the first layer only the state is read: SGLang's layers have one norm, under this name.
        tensors.setdefault(name.replace("hidden_norm", "input_layernorm"), tensors.pop(name))
    return tensors


def _eagle_settings(path: Path, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> HeadSettings:
    """What tensors show is counted: many a config.json has the numbers of the target."""
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise HeadError(f"{path}/config.json", f"hidden_act {activation}: only silu is served in heads")
    attention = "layers.0.self_attn."
    if (queries := tensors.get(f"{attention}q_proj.weight")) is not None and config.get("num_attention_heads"):
        config = {**config, "head_dim": len(queries) // int(config["num_attention_heads"])}
    layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    return replace(
        settings_of(config, path, layers=len(layers)),
        bias=f"{attention}q_proj.bias" in tensors,
        qk_norm=f"{attention}q_norm.weight" in tensors,
        gated=False,
    )


def _load_eagle(path: Path, config: dict[str, Any], target: TargetParts) -> Eagle3Head:
    tensors = _eagle_tensors(path)
    vocab = len(target.embedding)
    token_map = _token_map(tensors.pop("d2t", None), tensors.pop("t2d", None), vocab)
    inner = config.get("eagle_config") or {}
    taps = inner.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
    settings = _eagle_settings(path, config, tensors)
    variant = EagleVariant(
        taps=tuple(taps or default_taps(target.layers)),
        target_width=int(config.get("target_hidden_size") or target.width),
        logits_width=vocab if token_map is None else len(token_map),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=bool(inner.get("norm_before_fc", config.get("norm_before_fc", False))),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
        own_embedding="embed_tokens.weight" in tensors,
    )
    _check_eagle(path, variant, settings.width, target)
    head = Eagle3Head(settings, variant, target, token_map)
    # SGLang and SpecForge name the layers whose outputs are read, vLLM those whose inputs are.
    head.other_taps = tuple(tap + 1 for tap in variant.taps if tap < target.layers)
    if token_map is None:
        tied = tensors.get("embed_tokens.weight") if config.get("tie_word_embeddings") else None
        tensors.setdefault("lm_head.weight", target.head if tied is None else tied)
    tensors.setdefault("embed_tokens.weight", target.embedding)
    fill(head, tensors)
    return head


def _check_eagle(path: Path, variant: EagleVariant, width: int, target: TargetParts) -> None:
    file = f"{path}/config.json"
    if variant.target_width != target.width:
        raise HeadError(file, f"target_hidden_size {variant.target_width}, the target's is {target.width}")
    if not variant.own_embedding and width != target.width:
        raise HeadError("embed_tokens.weight", f"missing, and the target's has the width {target.width}, not {width}")
    if any(not 0 <= tap <= target.layers for tap in variant.taps):
        raise HeadError(file, f"eagle_aux_hidden_state_layer_ids {variant.taps}: the target has {target.layers} layers")


def _token_map(d2t: Tensor | None, t2d: Tensor | None, vocab: int) -> Tensor | None:
    """d2t is the distance from each of the head's ids to the target's; t2d marks the target's ids that it has."""
    if d2t is None:
        return None
    ids = d2t.long() + torch.arange(len(d2t))
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab):
        raise HeadError("d2t", f"names tokens outside the target's vocabulary of {vocab}")
    if bool((ids.diff() <= 0).any()):
        raise HeadError("d2t", "its tokens are not in ascending order")
    if t2d is not None and not torch.equal(t2d.nonzero()[:, 0], ids):
        raise HeadError("d2t", "names other tokens than t2d")
    return ids


def _load_medusa(path: Path, config: dict[str, Any], target: TargetParts) -> MedusaHead:
    def rename(name: str) -> str:
        name = name.removeprefix("medusa_heads.")
        block, _, rest = name.partition(".")
        if not block.isdigit():
            return name
        layer, _, kind = rest.partition(".")
        return f"blocks.{block}.layers.{layer}.{kind.removeprefix('linear.')}" if "linear" in kind else name

    tensors = read_tensors(path, rename)
    blocks = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    layers = {name.split(".")[3] for name in tensors if name.startswith("blocks.0.")}
    if not blocks or not layers:
        raise HeadError("blocks.0.layers.0.weight", "missing")
    for number in range(len(blocks)):
        # The first code's files have the vocabulary head as one more layer of a block.
        if (old := tensors.pop(f"{number}.{len(layers)}.weight", None)) is not None:
            tensors[f"lm_heads.{number}.weight"] = old
    token_map = tensors.pop("token_map", None)
    if "lm_head.weight" in tensors:
        tensors.setdefault("lm_heads.0.weight", tensors.pop("lm_head.weight"))
    own_heads = "lm_heads.1.weight" in tensors
    head = MedusaHead(
        target,
        len(blocks),
        layers=len(layers),
        bias="blocks.0.layers.0.bias" in tensors,
        token_map=None if token_map is None else token_map.long(),
        own_heads=own_heads,
    )
    if not own_heads:
        tensors.setdefault("lm_heads.0.weight", head.lm_heads[0].weight.data)  # type: ignore[arg-type]
    fill(head, tensors)
    return head


_QWEN = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
_DEEPSEEK = {"shared_head.norm.": "norm.", "shared_head.head.": "lm_head.", "embed_tokens.": "embed_tokens."}


def _load_mtp(path: Path, config: dict[str, Any], target: TargetParts) -> MtpHead:
    config = config.get("text_config") or config
    block = f"model.layers.{config.get('num_hidden_layers')}."

    def rename(name: str) -> str | None:
        if name.startswith("mtp."):
            part, _, rest = name.removeprefix("mtp.").partition(".")
            return f"{_QWEN.get(part, part)}.{rest}"
        if not name.startswith(block):
            return None
        rest = name.removeprefix(block)
        if rest.startswith(("enorm.", "hnorm.", "eh_proj.")):
            return rest
        return next((ours + rest.removeprefix(theirs) for theirs, ours in _DEEPSEEK.items() if rest.startswith(theirs)),
                    f"layers.0.{rest}")  # fmt: skip

    tensors = read_tensors(path, rename)
    if not tensors:
        raise HeadError(f"{block}eh_proj.weight", "missing, and so is mtp.fc.weight: the model has no such layer")
    if any(name.startswith("layers.1.") for name in tensors):
        raise HeadError("mtp.layers.1", "only one layer of multi-token prediction is served")
    head = MtpHead(settings_of(config, path, layers=1), target)
    tensors.setdefault("lm_head.weight", target.head)
    tensors.setdefault("embed_tokens.weight", target.embedding)
    fill(head, tensors)
    return head


def _load_ours(path: Path, config: dict[str, Any], target: TargetParts) -> nn.Module:
    about = config["outrider_head"]
    if about.get("format") != FORMAT:
        raise HeadError(f"{path}/config.json", f"head format {about.get('format')!r}, this version reads {FORMAT}")
    tensors = read_tensors(path, lambda name: name)
    token_map = tensors.pop("token_map").long() if "token_map" in tensors else None
    taps = tuple(about.get("taps") or ())
    if any(not 0 <= tap <= target.layers for tap in taps):
        raise HeadError(f"{path}/config.json", f"outrider_head.taps {taps}: the target has {target.layers} layers")
    head: nn.Module
    if about.get("kind") == "mtp":
        early = int(about.get("early", 0))
        normed = "enorm.weight" in tensors
        head = MtpHead(settings_of(config, path), target, token_map, norms_tokens=normed, early=early, taps=taps)
    elif about.get("kind") == "medusa":
        blocks = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
        head = MedusaHead(target, len(blocks), token_map=token_map)
    elif about.get("kind") == "eagle3":
        settings = settings_of(config, path)
        logits_width = len(target.head) if token_map is None else len(token_map)
        variant = EagleVariant(taps, target.width, logits_width, fc_norm="fc_norm.0.weight" in tensors)
        head = Eagle3Head(settings, variant, target, token_map)
        head.lm_head.weight = nn.Parameter(target.head if token_map is None else target.head[token_map])
    else:
        raise HeadError(f"{path}/config.json", f"outrider_head.kind {about.get('kind')!r}: mtp, eagle3 or medusa")
    shared = {name: value for name, value in head.state_dict().items() if name.startswith(("embed_", "lm_head"))}
    fill(head, {**shared, **tensors})
    return head
