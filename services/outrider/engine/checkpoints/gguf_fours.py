"""Weights of 4 bits in a GGUF file (Q4_0), put into its converted checkpoint as compressed-tensors packs them.

Q4_0 has a scale in float16 for 32 columns and the zero 8, which is compressed-tensors' symmetric int4 in groups of 32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

if TYPE_CHECKING:
    from gguf import GGUFReader

_GROUP = 32
_SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP},
        }
    },
}


_WHOLE = frozenset({"F32", "F16", "BF16"})


def what_widens(reader: GGUFReader) -> str:
    """Says which of its matrices take more memory than in the file, which have fewer bits there; empty if none do."""
    matrices = [tensor for tensor in reader.tensors if len(tensor.shape) > 1]
    kinds = sorted({matrix.tensor_type.name for matrix in matrices} - _WHOLE - {"Q4_0"})
    size = 2 * sum(int(m.n_elements) for m in matrices if m.tensor_type.name in kinds)
    return f": its weights in {', '.join(kinds)} become bfloat16, {size / 1e9:.1f} GB" if kinds else ""


def keep_fours(reader: GGUFReader, made: Path) -> None:
    """Replaces weights of the checkpoint `made` by their packed form, where that means the same."""
    config = json.loads((made / "config.json").read_text())
    scales, name_in_file = _scales(reader, config["num_hidden_layers"])
    if not scales:
        return
    changed = False
    for part in sorted(made.glob("*.safetensors")):
        tensors = load_file(part)
        for name in [name for name in tensors if name_in_file(name) in scales]:
            packed = _packed(tensors[name], scales[name_in_file(name)], config)
            if packed is not None:
                del tensors[name]
                tensors.update((f"{name}_{end}", tensor) for end, tensor in packed.items())
                changed = True
        save_file(tensors, part, metadata={"format": "pt"})
    if changed:
        (made / "config.json").write_text(json.dumps({**config, "quantization_config": _SCHEME}, indent=2))


def _scales(reader: GGUFReader, layers: int) -> tuple[dict[str, Tensor], Callable[[str], str]]:
    """[rows, groups] of each matrix in Q4_0 other than the embedding, by its name in the file; and that name for
    transformers' one."""
    import gguf

    arch = reader.fields["general.architecture"].contents()
    names = gguf.get_tensor_name_map(next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), layers)
    found = {}
    for tensor in reader.tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.Q4_0 and tensor.name != "token_embd.weight":
            # Of the 18 bytes of a group the first two are its scale.
            blocks = torch.from_numpy(tensor.data.copy()).view(len(tensor.data), -1, 18)
            found[tensor.name] = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
    return found, lambda name: names.get_name(name, try_suffixes=(".weight",)) or ""


def _packed(weight: Tensor, scales: Tensor, config: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """None if (number - 8) * scale is not the weight for any order of the rows."""
    for scale in _orders(scales, config):
        spread = scale.float().repeat_interleave(_GROUP, 1)
        numbers = torch.where(spread == 0, 0, weight.float() / spread).round().clamp(-8, 7)
        if torch.equal((numbers * spread).to(weight.dtype), weight):
            words = (numbers.to(torch.int64) + 8).view(len(weight), -1, 8) << torch.arange(0, 32, 4)
            return {
                "packed": words.sum(-1).to(torch.int32),
                "scale": scale.contiguous(),
                "shape": torch.tensor(weight.shape),
            }
    return None


def _orders(scales: Tensor, config: Mapping[str, Any]) -> Iterator[Tensor]:
    """As they are; and as transformers puts rows of queries and keys: llama.cpp rotates neighbours, it rotates
    halves."""
    yield scales
    for heads in (config["num_attention_heads"], config.get("num_key_value_heads")):
        if heads and len(scales) % (2 * heads) == 0:
            yield scales.view(heads, -1, 2, scales.shape[1]).transpose(1, 2).reshape(scales.shape)
