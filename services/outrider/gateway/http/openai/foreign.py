"""Fields that clients send because another server has them.

Those that change nothing about the text are taken. Those that would are refused by name, unless their value asks for
what happens anyway.
"""

from __future__ import annotations

from typing import Any

from outrider.errors import InvalidRequest
from outrider.gateway.http.errors import unsupported

HARMLESS: dict[str, tuple[str, ...]] = {
    "DashScope": ("preserve_thinking", "search_options"),
    "GLM": ("sensitive_word_check", "tool_stream", "user_id", "watermark_enabled"),
    "LiteLLM": (
        "additional_drop_params",
        "allowed_openai_params",
        "cache",
        "caching",
        "custom_llm_provider",
        "drop_params",
        "fallbacks",
        "litellm_call_id",
        "litellm_metadata",
        "litellm_session_id",
        "litellm_trace_id",
        "num_retries",
        "request_timeout",
        "tags",
        "timeout",
    ),
    "llama.cpp": (
        "cache_prompt",
        "dry_allowed_length",
        "dry_base",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "dynatemp_exponent",
        "id_slot",
        "mirostat_eta",
        "mirostat_tau",
        "n_cache_reuse",
        "n_keep",
        "repeat_last_n",
        "return_progress",
        "slot_id",
        "timings_per_token",
        "xtc_threshold",
    ),
    "LM Studio": ("draft_model", "ttl"),
    "Ollama": ("keep_alive", "num_ctx"),
    "OpenRouter": (
        "cache_control",
        "debug",
        "models",
        "provider",
        "route",
        "session_id",
        "trace",
        "transforms",
        "usage",
    ),
    "SGLang": ("custom_labels", "data_parallel_rank", "disagg_prefill_dp_rank", "rid", "routed_dp_rank"),
    "vLLM": ("media_io_kwargs", "mm_processor_kwargs", "truncation_side"),
}
"""By the server that has them: routing, billing, caching, timing, and details of options that are off."""
HARMLESS_NAMES = frozenset(name for names in HARMLESS.values() for name in names)

UNSERVED: dict[str, tuple[Any, ...]] = {
    # vLLM
    "cache_salt": (),
    "detokenize": (True,),
    "ec_transfer_params": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "priority": (0,),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    # SGLang
    "custom_logit_processor": ("",),
    "custom_params": ({},),
    "ebnf": ("",),
    "extra_key": (),
    "lora_path": (),
    "no_stop_trim": (False,),
    "regex": ("",),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "separate_reasoning": (True,),
    "session_params": ({},),
    "stop_regex": ("", []),
    "stream_reasoning": (True,),
    # llama.cpp
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar": ("",),
    "image_data": ([],),
    "json_schema": ("", {}),
    "lora": ([],),
    "mirostat": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "parse_tool_calls": (True,),
    "reasoning_budget": (-1,),
    "reasoning_format": ("auto", "deepseek", "parsed"),
    "repeat_penalty": (1,),
    "samplers": (),
    "tfs_z": (1,),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
    # Ollama
    "context": ([],),
    "format": ("",),
    "images": ([],),
    "num_predict": (-1,),
    "raw": (False,),
    "system": ("",),
    "template": ("",),
    # DashScope
    "enable_code_interpreter": (False,),
    "enable_search": (False,),
    "incremental_output": (True,),
    "result_format": ("message",),
    "thinking_budget": (),
    "translation_options": (),
    "vl_high_resolution_images": (False,),
    # LiteLLM, Mistral, OpenRouter, and what several have
    "guardrails": ([],),
    "mock_response": (),
    "plugins": ([],),
    "preset": (),
    "prompt_mode": (),
    "random_seed": (),
    "safe_prompt": (False,),
    "top_a": (0,),
    "typical": (1,),
}
"""With the values that are accepted."""

_OLLAMA_LOADS = (
    *("low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "numa"),
    *("use_mlock", "use_mmap", "vocab_only"),
)
_THINKING = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}


def check_ollama(options: dict[str, Any] | None) -> None:
    """Ollama's `options` say how it loads a model. Raises HttpError for one that says how to sample."""
    for name in options or ():
        if name not in _OLLAMA_LOADS:
            raise unsupported(f"options.{name[:100]}", "is not read here: give it as a field of the request")


def thinking_type(where: str, given: dict[str, Any]) -> bool | None:
    """Anthropic's, DeepSeek's and GLM's switch; None leaves it to the model. Raises InvalidRequest."""
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _THINKING:
        raise InvalidRequest(f"{where}.type", f"has to be one of {', '.join(_THINKING)}")
    return _THINKING[kind]
