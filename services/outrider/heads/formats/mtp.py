"""Heads of multi-token prediction: a part of a whole model's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.heads.formats.format import HeadFormat, OurHead, register
from outrider.heads.interface import HeadError, TargetParts
from outrider.heads.mtp import MtpHead
from outrider.heads.tensors import fill, read_tensors, settings_of

_QWEN = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_DEEPSEEK = {"shared_head.norm.": "norm.", "shared_head.head.": "lm_head.", "embed_tokens.": "embed_tokens."}


def _knows(config: dict[str, Any], path: Path) -> bool:
    # Qwen3-Next has such a layer and no field that says so.
    text = config.get("text_config") or config
    return any(text.get(key) for key in _FIELDS) or text.get("model_type") == "qwen3_next"


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
        kind = config.get("model_type")
        message = f"missing, and so is mtp.fc.weight: layers of {kind} are not served, only DeepSeek's form and Qwen's"
        raise HeadError(f"{block}eh_proj.weight", message)
    if any(name.startswith("layers.1.") for name in tensors):
        raise HeadError("mtp.layers.1", "only one layer of multi-token prediction is served")
    head = MtpHead(settings_of(config, path, layers=1), target)
    tensors.setdefault("lm_head.weight", target.head)
    tensors.setdefault("embed_tokens.weight", target.embedding)
    fill(head, tensors)
    return head


def _build(ours: OurHead, target: TargetParts) -> MtpHead:
    early, normed = int(ours.about.get("early", 0)), "enorm.weight" in ours.tensors
    settings = settings_of(ours.config, ours.path, ours=True)
    return MtpHead(settings, target, ours.token_map, norms_tokens=normed, early=early, taps=ours.taps)


register(HeadFormat("mtp", _knows, _load_mtp, _build))
