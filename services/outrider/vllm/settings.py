"""vLLM's settings under which its model can run with drafts from outside: checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from vllm import envs

from outrider.vllm.scheduler import METHOD, Scheduler
from outrider.vllm.server.plugin_config import PluginConfig


def check(config: Any) -> None:
    """Raises ValueError that names each setting at fault."""
    if problems := list(_problems(config)):
        raise ValueError("outrider: " + "; ".join(problems))


def _problems(config: Any) -> Iterator[str]:
    if not issubclass(config.scheduler_config.get_scheduler_cls(), Scheduler):
        yield "scheduler_cls: must be outrider.vllm.plugin.Scheduler beside this worker, which has no drafts of its own"
    given, parallel = config.speculative_config, config.parallel_config
    if given is None:
        yield f"speculative_config.method: must be {METHOD}, which makes room for drafts, or one of vLLM's drafters"
    elif given.method != METHOD:
        yield from _own_problems(given)
    elif swallowed := _swallowed(given):
        yield f"speculative_config.{swallowed[0]}: has no effect here, for vLLM makes no drafts of its own"
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline_parallel_size: must be 1, for nobody has tried drafts across stages; use tensor_parallel_size"
    if config.kv_transfer_config is not None:
        yield "kv_transfer_config: must be unset, for nobody has tried drafts with a KV connector"
    # Of another model each rank is a server of its own, whose size is 1.
    if parallel.data_parallel_size > 1:
        yield (
            "data_parallel_size: must be 1 for a mixture of experts, whose ranks run every step together: nobody has "
            "tried that where some of them verify drafts"
        )
    plugin = PluginConfig.of(config.additional_config)
    if envs.VLLM_USE_RUST_FRONTEND and (plugin.tenants or plugin.tenant_header or plugin.routers):
        yield (
            "VLLM_USE_RUST_FRONTEND: vLLM's front end in Rust has no middleware, so clients would choose their tenant; "
            "unset it, or leave out tenants, tenant_header and routers"
        )


def _own_problems(given: Any) -> Iterator[str]:
    """Of speculation for which vLLM makes the drafts."""
    if given.method == "extract_hidden_states":
        yield "speculative_config.method: extract_hidden_states drafts nothing"
    for name, wanted in (
        ("rejection_sample_method", "standard"),
        ("draft_sample_method", "greedy"),
        ("enable_adaptive_verification", False),
    ):
        if getattr(given, name) != wanted:
            yield f"speculative_config.{name}: must be {wanted}, for a drafted token is accepted if vLLM draws it"


def _swallowed(given: Any) -> list[str]:
    """Fields of vLLM's speculation that would do nothing."""
    models = {"target_model_config": given.target_model_config, "target_parallel_config": given.target_parallel_config}
    plain = type(given)(method=METHOD, num_speculative_tokens=given.num_speculative_tokens, **models)
    return [one.name for one in fields(plain) if getattr(plain, one.name) != getattr(given, one.name)]
