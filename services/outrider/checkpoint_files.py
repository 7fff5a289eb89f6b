"""Faults of a checkpoint that show in the names and the JSON of its files, before any process starts for it.

Reads no weights. Also for supervisors, which have neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from outrider.token_bytes import MAX_TOKEN_ID, TokenBytes, UnsupportedDecoder, flat_steps

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PICKLED_FAULT = "pickled weights run code when they are read; convert to safetensors"
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
READ_HERE = ("awq", "gptq", "compressed-tensors")
"""Schemes of quantized checkpoints that the engine reads itself: engine/checkpoints/packed_weights.py."""
# Of others, by `quant_method`: the module without which transformers cannot read them, if any.
_SCHEMES = {
    "aqlm": "aqlm",
    "auto-round": "auto_round",
    "bitnet": "accelerate",
    "bitsandbytes": "bitsandbytes",
    "eetq": "kernels",
    "fbgemm_fp8": "accelerate",
    "fp8": "accelerate",
    "fp_quant": "fp_quant",
    "higgs": "flute",
    "hqq": "hqq",
    "mxfp4": "kernels",
    "mxfp8": "accelerate",
    "nvfp4": "kernels",
    "quanto": "optimum",
    "quark": "quark",
    "spqr": "spqr_quant",
    "torchao": "torchao",
    "vptq": "vptq",
}


OTHER_ENGINE = "use --engine vllm"
"""The way to models that run, but not in the engine of this package."""
_ELSEWHERE = f"take plain weights, or {OTHER_ENGINE}"
_KV_SCALE = re.compile(r"\.(k_scale|v_scale|kv_scale|[kv]_zero_point|[kv]_proj\.output_scale)$")
_PACKED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".SCB", ".absmax")
"""Names of tensors that only quantized weights have."""
_OTHER_CONFIGS = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Where older tools and others write of it."""
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
_NUMBERS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rope_theta")
_MAX_JSON_BYTES = 1 << 28
MAX_LAYERS = 2_000
_NO_END = "not a file that ends"
_MAX_GROWTH = 1 << 12
_MAX_HEADER = 100 << 20
"""In bytes, as safetensors has it."""
_GPTQ_FORMS: dict[str, tuple[Any, ...]] = {
    "checkpoint_format": ("gptq", "gptq_v2"),
    "format": ("gptq", "gptq_v2"),
    "pack_dtype": ("int32",),
    "is_marlin_format": (False,),
    "rotation": (),
    "adapter": (),
}
_COMPRESSED_FORMS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_COMPRESSED_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "num_bits": (4, 8),
    "type": ("int", "float", None),
    "strategy": ("tensor", "channel", "group", "block", None),
}


_SAMPLING = {
    "temperature": ("temperature", 0.0, 100.0),
    "top_k": ("top_k", -1, 2**31 - 1),
    "top_p": ("top_p", 1e-6, 1.0),
    "min_p": ("min_p", 0.0, 1.0),
    "repetition_penalty": ("repetition_penalty", 0.1, 10.0),
    "max_new_tokens": ("max_tokens", 1, 2**32 - 1),
}
"""Of generation_config.json: a field's name in requests, and its bounds."""


class CheckpointFault(NamedTuple):
    file: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {self.message}"


def fault(path: Path) -> CheckpointFault | None:
    if path.suffix in _PICKLED:
        return CheckpointFault(path.name, _PICKLED_FAULT)
    if not path.is_dir():
        return CheckpointFault(str(path), "not a checkpoint directory")
    config = _read(path / "config.json")
    if isinstance(config, CheckpointFault):
        return config
    text = config.get("text_config")
    layers = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    if isinstance(layers, int) and layers > MAX_LAYERS:
        return CheckpointFault(f"{path}/config.json", f"num_hidden_layers: {layers}; at most {MAX_LAYERS} are made")
    found = _weights_fault(path)
    if found is not None or "outrider_draft" in config:
        # A distilled draft has its target's tokenizer.
        return found
    return _tokenizer_fault(path) or _ends_fault(path, config) or _sampling_fault(path)


def engine_fault(path: Path) -> CheckpointFault | None:
    """What the engine of this package cannot run of a checkpoint without `fault`; vLLM may."""
    config = _read(path / "config.json")
    if isinstance(config, CheckpointFault):
        return config
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    wrong = number_problem(text)
    faults = (
        CheckpointFault(f"{path}/config.json", wrong) if wrong else None,
        _scheme_fault(path, config),
        _attention_fault(path, text),
        _rotary_fault(path, text),
        _adapter_fault(path),
    )
    return next(filter(None, faults), None)


def number_problem(config: Mapping[str, Any]) -> str | None:
    """Which number of a config.json no model can have; None if there is none."""
    for name in (*_SIZES, *_NUMBERS):
        value, whole = config.get(name), name in _SIZES
        # Some families have a list with a number for each layer.
        if value is None or isinstance(value, list):
            continue
        # Written so that NaN fails too.
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not 0 < value < math.inf:
            return f"{name}: {value!r} is not a {'whole ' if whole else ''}number above 0"
    return None


def end_tokens(path: Path) -> tuple[int, ...]:
    """The model's end tokens, from generation_config.json, else config.json, else the part of that about texts, as
    transformers has it. Raises ValueError for what is no id."""
    for name, part in (("generation_config.json", ""), ("config.json", ""), ("config.json", "text_config")):
        stated: Any = read_json(path / name) if (path / name).exists() else {}
        stated = stated.get(part) if part else stated
        ids = stated.get("eos_token_id") if isinstance(stated, dict) else None
        if ids is not None and ids != []:
            found = ids if isinstance(ids, list) else [ids]
            if not all(isinstance(i, int) and not isinstance(i, bool) for i in found):
                raise ValueError(f"{path}/{name}: eos_token_id: {ids!r} is not a token id")
            return tuple(found)
    return ()


def sampling_defaults(path: Path) -> dict[str, float]:
    """What generation_config.json states of a request's own fields, by the names of those, as vLLM takes it.

    Raises ValueError that names the file and the field.
    """
    file = path / "generation_config.json"
    stated = read_json(file) if file.exists() else {}
    found = dict[str, float]()
    for name, (ours, least, most) in _SAMPLING.items():
        if (value := stated.get(name)) is None:
            continue
        kinds = (int,) if isinstance(least, int) else (int, float)
        if isinstance(least, int) and isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            raise ValueError(f"{file}: {name}: {value!r} is not a number from {least:g} to {most:g}")
        # A top_k of -1 means the same as 0: all tokens.
        found[ours] = max(value, 0)
    return found


def read_json(file: Path) -> dict[str, Any]:
    """Raises OSError, ValueError."""
    if file.exists() and not file.is_file():
        raise ValueError(_NO_END)
    if (size := file.stat().st_size) > _MAX_JSON_BYTES:
        raise ValueError(f"{size} bytes; at most {_MAX_JSON_BYTES} are read")
    try:
        found = json.loads(file.read_text())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _read(file: Path) -> dict[str, Any] | CheckpointFault:
    if not file.exists():
        return CheckpointFault(str(file), "missing")
    try:
        return read_json(file)
    except (OSError, ValueError) as error:
        return CheckpointFault(str(file), str(error))


def weight_files(path: Path) -> list[Path]:
    """The files that have the model's weights: those of the index, else model.safetensors, else all. Others, such as a
    head's, an adapter's or the weights in their author's form, are none of the model's."""
    if (path / _INDEX).exists():
        return [path / name for name in sorted(set(map(str, read_json(path / _INDEX)["weight_map"].values())))]
    whole = path / _WHOLE
    return [whole] if whole.is_file() else sorted(path.glob("*.safetensors"))


def other_weights(path: Path) -> list[str]:
    """The names of files with weights that are left alone."""
    used = {file.name for file in weight_files(path)}
    return sorted(
        file.name for file in path.iterdir() if file.suffix in (".safetensors", ".gguf") and file.name not in used
    )


def _weights_fault(path: Path) -> CheckpointFault | None:
    found = sorted(file.name for file in path.iterdir())
    weights = [name for name in found if name.endswith(".safetensors")]
    if not weights:
        pickled = [name for name in found if name.endswith(_PICKLED)]
        return (
            CheckpointFault(f"{path}/{pickled[0]}", _PICKLED_FAULT)
            if pickled
            else CheckpointFault(f"{path}/model.safetensors", "missing")
        )
    for name in weights:
        if (path / name).exists() and not (path / name).is_file():
            return CheckpointFault(f"{path}/{name}", _NO_END)
    if _INDEX in found:
        index = _read(path / _INDEX)
        if isinstance(index, CheckpointFault):
            return index
        shards = index.get("weight_map")
        if not isinstance(shards, dict) or not shards:
            return CheckpointFault(f"{path}/{_INDEX}", "weight_map: names no weights")
        if missing := sorted(set(map(str, shards.values())) - set(weights)):
            return CheckpointFault(f"{path}/{missing[0]}", f"missing, and {_INDEX} names it")
        if _WHOLE in weights and _WHOLE not in shards.values():
            # transformers takes it, and vLLM the shards.
            first = min(map(str, shards.values()))
            return CheckpointFault(f"{path}/{_WHOLE}", f"weights twice: {first} has them too; remove one of them")
    return None


def quantization_of(config: dict[str, Any]) -> Any:
    """What a config.json says of quantized weights, of a model that also takes images within its text part."""
    text = config.get("text_config")
    return config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)


def _scheme_fault(path: Path, config: dict[str, Any]) -> CheckpointFault | None:
    file, names = f"{path}/config.json", list(_tensor_names(path))
    if scaled := next((name for name in names if _KV_SCALE.search(name)), None):
        return CheckpointFault(str(path), f"{scaled}: scales of keys and values are not read; {_ELSEWHERE}")
    if "compression_config" in config:
        return CheckpointFault(file, "compression_config: the old name of quantization_config; write that there")
    stated = quantization_of(config)
    if stated is None:
        if (packed := next((name for name in names if name.endswith(_PACKED)), None)) is None:
            return None
        stated_in = next((name for name in _OTHER_CONFIGS if (path / name).is_file()), "")
        way = f"; {stated_in} may say it: write that there, with a quant_method" if stated_in else ""
        return CheckpointFault(file, f"quantization_config: missing, though {packed} is of quantized weights{way}")
    method = stated.get("quant_method") if isinstance(stated, dict) else None
    if method in READ_HERE:
        problem = _packing_problem(stated)
        return CheckpointFault(file, f"quantization_config: {problem}; {_ELSEWHERE}") if problem else None
    if method not in _SCHEMES:
        return CheckpointFault(
            file, f"quantization_config: quant_method {method!r} is not known; convert it, or take plain weights"
        )
    library = _SCHEMES[method]
    if find_spec(library) is None:
        message = (
            f"quantization_config: weights in {method} need {library}, which is not installed; or take plain weights"
        )
        return CheckpointFault(file, message)
    return None


def _tensor_names(path: Path) -> Iterator[str]:
    """Of the model's weights, from the headers alone; a file that is not sound has none."""
    for file in weight_files(path):
        try:
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(size)) if size <= _MAX_HEADER else {}
        except (OSError, ValueError):
            continue
        yield from header if isinstance(header, dict) else ()


def _packing_problem(scheme: dict[str, Any]) -> str | None:
    """Why weights of this `quantization_config` cannot be read; None if there is no reason."""
    read = {"awq": _awq_problem, "gptq": _gptq_problem, "compressed-tensors": _compressed_problem}
    try:
        return read[scheme["quant_method"]](scheme)
    except (AttributeError, TypeError) as error:
        return f"is not in the form of {scheme['quant_method']}: {error}"


def _awq_problem(scheme: dict[str, Any]) -> str | None:
    version, bits = scheme.get("version", scheme.get("format", "gemm")), scheme.get("bits", scheme.get("w_bit", 4))
    if str(version).lower() != "gemm" or bits != 4:
        return f"awq of version {version} with {bits} bits is not read, only gemm with 4"
    if scheme.get("zero_point") is False:
        return "zero_point: awq without zeros is not read"
    if (backend := scheme.get("backend")) == "llm-awq":
        return f"backend: awq of {backend} is not read, only autoawq"
    return None


def _gptq_problem(scheme: dict[str, Any]) -> str | None:
    bits = scheme.get("bits")
    if bits not in (2, 4, 8):
        return f"bits: gptq with {bits} is not read, only with 2, 4 or 8"
    for name, known in _GPTQ_FORMS.items():
        if (value := scheme.get(name)) not in (None, *known):
            return f"{name}: {value} of gptq is not read, only {' or '.join(map(str, known))}"
    for field in ("dynamic", "extra_config"):
        for layers, rule in (scheme.get(field) or {}).items():
            # Layers that stay as they were have no packed tensors.
            other = rule.get("bits", bits) if isinstance(rule, dict) and not layers.startswith("-:") else bits
            if other not in (bits, 16, 32):
                return f"{field}: {layers}: bits: {other} is not read where the others have {bits}"
    return None


def _compressed_problem(scheme: dict[str, Any]) -> str | None:
    for name, part in (("kv_cache_scheme", None), ("transform_config", None), ("sparsity_config", "format")):
        stated = scheme.get(name)
        if stated and (part is None or stated.get(part) not in (None, "dense")):
            return f"{name}: is not read"
    for name, group in (scheme.get("config_groups") or {}).items():
        if not isinstance(group, dict):
            return f"config_groups: {name}: says no more than {group!r}"
        form, weights = group.get("format") or scheme.get("format"), group.get("weights") or {}
        if form not in _COMPRESSED_FORMS:
            known = ", ".join(_COMPRESSED_FORMS)
            return f"config_groups: {name}: format {form} of compressed-tensors is not read, only {known}"
        for field, known_values in _COMPRESSED_WEIGHTS.items():
            if (value := weights.get(field)) not in known_values:
                allowed = " and ".join(str(known) for known in known_values if known is not None)
                return f"config_groups: {name}: {field}: {value} is not read, only {allowed}"
        if weights.get("type") == "float" and weights["num_bits"] != 8:
            return f"config_groups: {name}: num_bits: floats of {weights['num_bits']} bits are not read, only of 8"
    return None


def _attention_fault(path: Path, config: dict[str, Any]) -> CheckpointFault | None:
    """Of families that are known by their names; others show when their model is made."""
    kind = config.get("model_type")
    if config.get("kv_lora_rank"):
        reason = "multi-head latent attention (kv_lora_rank), whose cache is no keys and values of heads"
    elif kind == "gpt_oss":
        reason = "its attention has attention sinks (s_aux)"
    else:
        return None
    return CheckpointFault(f"{path}/config.json", f"model_type {kind}: {reason}; {OTHER_ENGINE}")


def _rotary_fault(path: Path, config: dict[str, Any]) -> CheckpointFault | None:
    file = f"{path}/config.json"
    found = {field: config.get(field) for field in ("rope_scaling", "rope_parameters")}
    old, new = (stated if isinstance(stated, dict) else {} for stated in found.values())
    for field, stated in (("rope_scaling", old), ("rope_parameters", new)):
        if "su" in (stated.get("type"), stated.get("rope_type")):
            return CheckpointFault(file, f"{field}: type su is the old name of longrope; write longrope there")
    within, outside = (stated.get("rope_theta") for stated in (old or new, config))
    if within is not None and outside is not None and within != outside:
        return CheckpointFault(file, f"rope_theta: {outside}, and {within} in the other place; remove one of them")
    # transformers takes the old one, and nothing of the new.
    used = {"rope_type": old.get("type"), "type": old.get("rope_type"), "rope_theta": outside, **old}
    if old and (lost := sorted(name for name, value in new.items() if used.get(name) != value)):
        message = f"rope_parameters: {', '.join(lost)}: rope_scaling is there too and says something else; remove one"
        return CheckpointFault(file, message)
    return None


def _adapter_fault(path: Path) -> CheckpointFault | None:
    file = path / "adapter_config.json"
    if not file.is_file() or find_spec("peft") is None:
        return None
    return CheckpointFault(str(file), "transformers would apply it, as peft is installed here; remove one of them")


def _tokenizer_fault(path: Path) -> CheckpointFault | None:
    file = path / "tokenizer.json"
    if file.exists():
        return _decoder_fault(file)
    others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (path / name).is_file()]
    way = f"; transformers' save_pretrained writes it of {others[0]}" if others else ""
    return CheckpointFault(str(file), f"missing{way}")


def _sampling_fault(path: Path) -> CheckpointFault | None:
    file = f"{path}/generation_config.json"
    try:
        sampling_defaults(path)
    except (OSError, ValueError) as error:
        return CheckpointFault(file, str(error).removeprefix(f"{file}: "))
    return None


def _decoder_fault(file: Path) -> CheckpointFault | None:
    spec = _read(file)
    if isinstance(spec, CheckpointFault):
        return spec
    try:
        TokenBytes.build((), spec.get("decoder"), ())
        problem = _endless(spec)
    except UnsupportedDecoder as error:
        return CheckpointFault(str(file), str(error))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        return CheckpointFault(str(file), f"not a tokenizer: {type(error).__name__}: {error}")
    return CheckpointFault(str(file), problem) if problem else None


def _endless(spec: dict[str, Any]) -> str | None:
    """What of a tokenizer would take time or memory without bound."""
    vocab = spec["model"]["vocab"]
    ids = [*(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))]
    ids += [token["id"] for token in spec.get("added_tokens") or ()]
    if (highest := max(ids, default=0)) > MAX_TOKEN_ID:
        return f"the token id {highest}; at most {MAX_TOKEN_ID} is read"
    for name in ("normalizer", "decoder"):
        growth = 1
        for step in flat_steps(spec.get(name) or {}):
            if step.get("type") == "Replace":
                # A regular expression may match nothing, between any two characters.
                growth *= max(1, 1 + len(step["content"]) // max(1, len(step["pattern"].get("String", ""))))
        if growth > _MAX_GROWTH:
            return f"{name}: its replacements make a text up to {growth} times longer"
    return None


def _ends_fault(path: Path, config: dict[str, Any]) -> CheckpointFault | None:
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size") or config.get("vocab_size")
    try:
        ends = end_tokens(path)
    except (OSError, ValueError) as error:
        file, _, message = str(error).rpartition(": eos_token_id: ")
        return CheckpointFault(
            file or f"{path}/generation_config.json", f"eos_token_id: {message}" if file else message
        )
    wrong = [i for i in ends if i < 0 or (isinstance(size, int) and i >= size)]
    if wrong:
        return CheckpointFault(
            f"{path}/config.json", f"eos_token_id: {wrong[0]} is outside the vocabulary of {size} tokens"
        )
    return None
