"""Names that the scheduler and the worker share, and what Outrider changes in vLLM's front end: requests with min_p and
logit_bias are let through.

vLLM refuses both where there is speculation, because its first model runner cannot verify them. Its second one can.
vLLM calls `permit` in each of its processes, as one of its general plugins.
"""

from __future__ import annotations

from typing import Any

WORKER = "outrider.vllm.worker.Worker"
HEAD = "outrider_remote_head"
"""Key in vLLM's additional_config, which is part of the key of its compiled models: the head's directory."""


def permit() -> None:
    from vllm.sampling_params import SamplingParams

    # Another release may have none, and may run without any of our flags.
    check = getattr(SamplingParams, "_validate_spec_decode", lambda *given: None)

    def validate(self: Any, speculative_config: Any) -> None:
        if speculative_config is None or speculative_config.target_parallel_config.worker_cls != WORKER:
            check(self, speculative_config)

    SamplingParams._validate_spec_decode = validate
