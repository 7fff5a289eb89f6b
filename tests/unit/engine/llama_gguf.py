"""A Llama's checkpoint as a GGUF file, as llama.cpp's converter would write it.

Whoever uses it for text names the pre-tokenizer; without one it is right only for a tokenizer without merges.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from numpy.typing import NDArray
from safetensors.torch import load_file

# The last one-byte token, such as 0xAD, which begins no character.
_RARE_BYTE = 258
# Hugging Face's names → llama.cpp's, within a layer.
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    checkpoint: Path,
    file: Path,
    quantization: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
    *,
    pre: str = "default",
    eot: int | None = None,
) -> Path:
    """Writes a Llama's checkpoint directory into `file` and returns it. Matrices are quantized, norms are float32.
    `pre`: llama.cpp's name of the pre-tokenizer; `eot`: a token that ends a turn, beside the EOS token.

    Raises ValueError for another kind of model.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    if (kind := (config["model_type"], config["rope_parameters"]["rope_type"])) != ("llama", "default"):
        raise ValueError(f"{checkpoint}: {kind[0]} with rope {kind[1]}, not a plain Llama")
    writer = GGUFWriter(file, "llama")
    writer.add_file_type(next(t for t in LlamaFileType if t.name.startswith(f"MOSTLY_{quantization.name}")))
    _write_settings(writer, config)
    _write_tokenizer(writer, checkpoint, config, pre)
    if eot is not None:
        writer.add_eot_token_id(eot)
    for path in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            values = permuted(name, tensor.float().numpy(), config)
            if values.ndim == 2:
                writer.add_tensor(_gguf_name(name), gguf.quantize(values, quantization), raw_dtype=quantization)
            else:
                writer.add_tensor(_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _write_settings(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _write_tokenizer(writer: GGUFWriter, checkpoint: Path, config: dict[str, Any], pre: str) -> None:
    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if not merges:
        # transformers takes a vocabulary without merges for one with scores, so add a merge of a byte that no text has.
        tokens[-1] = 2 * tokens[_RARE_BYTE]
        merges = [f"{tokens[_RARE_BYTE]} {tokens[_RARE_BYTE]}"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    # 1 is an ordinary token, 3 a control token.
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _gguf_name(name: str) -> str:
    fixed = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if name in fixed:
        return f"{fixed[name]}.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest.removesuffix('.weight')]}.weight"


def permuted(name: str, values: NDArray[np.float32], config: dict[str, Any]) -> NDArray[np.float32]:
    """Reorders the rows of queries and keys: llama.cpp rotates neighbours, Hugging Face rotates halves."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, count in heads.items():
        if part in name:
            rows, columns = values.shape
            halves = values.reshape(config[count], 2, -1, columns)
            return halves.swapaxes(1, 2).reshape(rows, columns)
    return values
