"""Checks whether the engine can serve a model: decoders whose only state is keys and values, with all weights present.

Inspects transformers' configs, classes and reports; reads no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.checkpoint_files import OTHER_ENGINE

_MAX_NAMED = 5
# Their configs state a window, and transformers' models of them do not look back through it.
_UNUSED_WINDOWS = {"moshi"}


def architecture_problem(config: Any) -> str | None:
    """Why no engine runs a model of this config, before any weight is read; None when there is no reason."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.is_encoder_decoder:
        return "an encoder with a decoder; only decoders are served"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "does not generate text"
    named = config.architectures or []
    if named and not set(named) & set(_flat(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())):
        return f"{named[0]} does not generate text"
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if model._is_stateful:
        return f"recurrent: it keeps a state that cannot be rewound; {OTHER_ENGINE}"
    if not model._supports_attention_backend:
        return f"its attention cannot be replaced by one over a paged cache; {OTHER_ENGINE}"
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        return f"its attention caps scores (attn_logit_softcapping), which no attention here does; {OTHER_ENGINE}"
    if config.model_type in _UNUSED_WINDOWS and config.sliding_window:
        return f"its config states a window (sliding_window) that transformers does not use; {OTHER_ENGINE}"
    return None


def model_problem(model: nn.Module) -> str | None:
    """Why the engine cannot run a model that is loaded; None when there is no reason."""
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        return "an encoder: its tokens look at what comes after them"
    return None


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """The decoder of a model that also takes images, as the model of texts that it is; any other model itself."""
    inner, settings = getattr(model.base_model, "language_model", None), model.config.get_text_config()
    if inner is None or settings is model.config:
        return model
    with torch.device("meta"):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(settings)
    if type(made.base_model) is not type(inner):
        return model
    setattr(made, made.base_model_prefix, inner)
    made.set_output_embeddings(model.get_output_embeddings())
    return made


def tensors_problem(report: Mapping[str, Any]) -> str | None:
    """The problem that transformers' loading report shows with missing or foreign tensors; None when all fit."""
    misshapen = [key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]]
    found = (
        _named("missing", report["missing_keys"]),
        _named("of another shape than the config asks for", misshapen),
        _named("unexpected", report["unexpected_keys"]),
    )
    return "; ".join(filter(None, found)) or None


def _named(what: str, keys: Iterable[str]) -> str:
    names = sorted(keys)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"tensors {what}: {', '.join(names[:_MAX_NAMED])}{more}" if names else ""


def _flat(names: Iterable[str | tuple[str, ...]]) -> Iterator[str]:
    for name in names:
        yield from (name,) if isinstance(name, str) else name
