"""The weights of a GGUF file as a checkpoint of transformers, in bfloat16.

Each tensor of the file is a parameter of the model, or part of one; a file with any other, or without one that the
model needs, is refused by its name before a weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.engine.checkpoints.checkpoints import CheckpointError
from outrider.engine.checkpoints.gguf_settings import ROTARY_TENSORS, GgufModel

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_EXPERTS = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.down_proj": ("ffn_down_exps.weight",),
}
"""Of a layer: what transformers joins, with all experts in one tensor."""


def convert(file: Path, reader: GGUFReader, model: GgufModel, made: Path) -> None:
    """Raises CheckpointError that names a tensor."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.for_model(model.kind, **model.settings)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # transformers checks configs in many ways
        raise CheckpointError(str(file), f"transformers has no {model.kind} with its settings: {error}") from error
    wanted = empty.state_dict()
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    sources = dict(_sources(reader, wanted))
    stored = {tensor.name: tensor for tensor in reader.tensors}
    used = {part for parts in sources.values() for part in parts}
    if problem := _problem(stored.keys() - {*ROTARY_TENSORS}, used):
        raise CheckpointError(str(file), problem)
    state = {}
    for name, parts in sources.items():
        found = torch.cat([_numbers(stored[part]) for part in parts], dim=-2 if len(parts) > 1 else 0)
        try:
            state[name] = _ordered(name, found, model).to(torch.bfloat16).view(wanted[name].shape)
        except RuntimeError as error:
            raise CheckpointError(str(file), f"{' + '.join(parts)}: of another shape than {name}: {error}") from error
    empty.load_state_dict(state, strict=False, assign=True)
    empty.tie_weights()
    for name, value in model.sampling.items():
        setattr(empty.generation_config, name, value)
    empty.generation_config.do_sample = bool(model.sampling) or None
    empty.save_pretrained(made)


def _sources(reader: GGUFReader, wanted: dict[str, Tensor]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """For each parameter: the tensors of the file that are its parts."""
    import gguf

    arch = reader.fields["general.architecture"].contents()
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    layers = 1 + max(int(name.split(".")[2]) for name in wanted if name.startswith("model.layers."))
    names = gguf.get_tensor_name_map(kind, layers)
    for name in wanted:
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        if (experts := _EXPERTS.get(part)) is not None:
            yield name, tuple(f"blk.{layer}.{expert}" for expert in experts)
        else:
            module, _, end = name.rpartition(".")
            yield name, (f"{names.get_name(module)}.{end}",)


def _problem(stored: set[str], used: set[str]) -> str | None:
    found = []
    for what, names in (("missing", used - stored), ("that are not read", stored - used)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            found.append(f"tensors {what}: {', '.join(sorted(names)[:5])}{more}")
    return "; ".join(found) or None


def _numbers(tensor: ReaderTensor) -> Tensor:
    import gguf

    # A copy: a file may not be written to.
    values: Any = gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32", copy=True)
    return torch.from_numpy(values)


def _ordered(name: str, values: Tensor, model: GgufModel) -> Tensor:
    """As transformers has them."""
    if name.endswith("norm.weight"):
        return values - model.family.added_to_norms
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if not model.family.rotates_neighbours or heads is None:
        return values
    return values.view(model.settings[heads], -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
