"""The checkpoint format of a distilled draft: only what differs from its target, in 8 bits.

A draft shares its target's embedding. Its file holds its own layers (int8, one scale per output row), its norms, and
the list of tokens that its head covers. Embedding and head rows are read from the target's checkpoint: a target whose
head is not its embedding lends both. config.json is a Llama's, and its `outrider_draft` names the target.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.checkpoint_files import weight_files
from outrider.engine.checkpoints import checkpoints
from outrider.engine.checkpoints.checkpoints import CheckpointError
from outrider.engine.checkpoints.fetching import resolve
from outrider.engine.checkpoints.quantization import Int8Linear, quantize, quantize_rows

FORMAT = 1
_WEIGHTS = "draft.safetensors"
_SCALE = ".scale"
_RECIPE = "recipe.json"
_PACKED = ("qweight", "weight_packed")
MAX_RECIPE_CHARS = 4000


def save_draft_model(
    directory: Path,
    model: LlamaForCausalLM,
    token_map: Tensor,
    *,
    base: str,
    recipe: dict[str, Any],
) -> None:
    """Writes config.json, draft.safetensors and recipe.json."""
    tensors: dict[str, Tensor] = {"token_map": token_map.to(torch.int32)}
    noise = rounding_noise()
    for name, value in model.model.state_dict().items():
        if name.startswith("embed_tokens"):
            continue
        if value.dim() == 2:
            tensors[name], tensors[name + _SCALE] = quantize_rows(value, torch.float16, noise)
        else:
            tensors[name] = value.to(torch.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / _WEIGHTS)
    config = model.config.to_dict()
    config["outrider_draft"] = {"format": FORMAT, "base": base}
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    write_recipe(directory, recipe)


def rounding_noise() -> torch.Generator:
    """For weights that were learnt. One that began on the grid of 8 bits has mostly moved by less than half a step:
    rounded to the nearest number, it would be where it began."""
    return torch.Generator().manual_seed(0)


def write_recipe(directory: Path, recipe: dict[str, Any]) -> None:
    """recipe.json: how the draft was made, and what was measured."""
    (directory / _RECIPE).write_text(json.dumps(recipe, indent=2, sort_keys=True) + "\n")


def read_recipe(path: Path) -> str:
    """The recipe of the draft at `path` as one line of JSON; empty if it has none, or one too long for a lease."""
    try:
        recipe = json.dumps(json.loads((path / _RECIPE).read_text()), sort_keys=True)
    except (OSError, ValueError):
        return ""
    return recipe if len(recipe) <= MAX_RECIPE_CHARS else ""


def load_draft_model(path: Path, dtype: torch.dtype, *, in_int8: bool = False) -> tuple[LlamaForCausalLM, Tensor]:
    """The model with its reduced head, and token_map [head rows]: the token id of each row.

    in_int8: keeps the layers in int8 and quantizes the head, for kernels that take such weights.
    """
    settings = checkpoints.read_config(path)
    about = settings.pop("outrider_draft")
    if about.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}/config.json", f"draft format {about.get('format')!r}, this version reads {FORMAT}"
        )
    base = resolve(about["base"])
    embedding, head = (weights.to(dtype) for weights in (read_embedding(base), read_head(base)))
    stored = _read_weights(path)
    token_map = stored.pop("token_map").long()
    weights = {name: value for name, value in stored.items() if not name.endswith(_SCALE)}
    for name, value in weights.items():
        if value.dtype == torch.int8:
            value = value.float() * stored[name + _SCALE].float()[:, None]
        weights[name] = value.to(dtype)
    model = build_draft_model(LlamaConfig(**settings), embedding, token_map, head)
    try:
        model.model.load_state_dict({**weights, "embed_tokens.weight": embedding}, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{path}/{_WEIGHTS}", f"does not fit config.json: {error}") from error
    if in_int8:
        _keep_int8(model, stored)
    return model, token_map


def _read_weights(path: Path) -> dict[str, Tensor]:
    file = path / _WEIGHTS
    if not file.is_file():
        raise CheckpointError(str(file), "missing")
    stored: dict[str, Tensor] = load_file(file)
    wanted = {"token_map", *(name + _SCALE for name, value in stored.items() if value.dtype == torch.int8)}
    if missing := sorted(wanted.difference(stored)):
        raise CheckpointError(str(file), f"tensors missing: {', '.join(missing)}")
    return stored


def _keep_int8(model: LlamaForCausalLM, stored: dict[str, Tensor]) -> None:
    for name, scale in stored.items():
        if name.endswith(_SCALE):
            weight = name.removesuffix(_SCALE)
            layer, _, _ = weight.rpartition(".")
            model.model.set_submodule(layer, Int8Linear(stored[weight], scale))
    quantize(model, "int8")
    for module in model.modules():
        if isinstance(module, Int8Linear):
            module.rounds_inputs = True


def build_draft_model(
    config: LlamaConfig, embedding: Tensor, token_map: Tensor, target_head: Tensor | None = None
) -> LlamaForCausalLM:
    """A Llama on the target's embedding [vocab, width]. Its head consists of the rows of the target's head
    [vocab, width] that `token_map` names; without `target_head`, of the embedding's."""
    from outrider.engine.models.decoder import register_attention

    config.tie_word_embeddings = False
    config._attn_implementation = register_attention()
    model = LlamaForCausalLM(config).to(embedding.dtype)
    model.model.embed_tokens = nn.Embedding.from_pretrained(embedding)  # type: ignore[no-untyped-call]
    head = nn.Linear(embedding.shape[1], len(token_map), bias=False, dtype=embedding.dtype)
    rows = embedding if target_head is None else target_head
    head.weight = nn.Parameter(rows[token_map].clone(), requires_grad=False)
    model.lm_head = head
    return model


def read_embedding(path: Path) -> Tensor:
    """The input embedding of a checkpoint, [vocab, width]. Raises CheckpointError."""
    found = _read_weight(path, "embed_tokens")
    if found is None:
        raise CheckpointError(str(path), "no embed_tokens.weight in its safetensors files")
    return found


def read_head(path: Path) -> Tensor:
    """The vocabulary head of a checkpoint, [vocab, width]: its own, or the embedding if the file has no other, as in
    transformers. Raises CheckpointError."""
    found = _read_weight(path, "lm_head")
    return read_embedding(path) if found is None else found


def _read_weight(path: Path, layer: str) -> Tensor | None:
    """None if the files have no such layer."""
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                if not name.endswith((f"{layer}.weight", *(f"{layer}.{part}" for part in _PACKED))):
                    continue
                found: Tensor = tensors.get_tensor(name)
                if not name.endswith(".weight") or found.dtype.itemsize < 2:
                    raise CheckpointError(str(path), f"{name}: quantized, and drafts share plain weights alone")
                return found
    return None
