"""From an opening to vLLM's request. What vLLM cannot do is refused here, with the name of the field."""

from __future__ import annotations

import time
from typing import Any

from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

from outrider.errors import NotSupported
from outrider.options.logits import LogitsOptions
from outrider.target.requests.opening import Limits, Opening
from outrider.vllm.coupling import BIAS, COMMITTED, EXTRA

_MIN_TEMPERATURE = 0.01
"""vLLM raises lower ones to this."""


def check_supported(opening: Opening) -> None:
    """Raises NotSupported for what another engine would do and vLLM does not."""
    params = opening.params
    # Rounded, because the 32-bit float nearest to 0.01 is less than 0.01.
    if 0 < round(params.temperature, 6) < _MIN_TEMPERATURE:
        raise NotSupported("sampling.temperature", f"vLLM samples from {_MIN_TEMPERATURE:g} on; 0 is greedy")


def request_of(request_id: str, opening: Opening, limits: Limits) -> EngineCoreRequest:
    """The request that continues the opening after its committed tokens."""
    tokens = [*opening.prompt, *opening.committed]
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=tokens,
        mm_features=None,
        sampling_params=sampling_of(opening, limits),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=opening.salt.hex() or None,
        data_parallel_rank=None,
    )


def sampling_of(opening: Opening, limits: Limits) -> SamplingParams:
    params, done = opening.params, len(opening.committed)
    options = opening.logits or LogitsOptions()
    left = min(opening.stopping.max_new_tokens - done, limits.max_context_len - len(opening.prompt) - done)
    asked = opening.logprobs
    sampling = SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=None if params.greedy else params.seed,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        allowed_token_ids=list(options.allowed_token_ids) or None,
        min_tokens=max(0, min(options.min_tokens - done, left)),
        max_tokens=left,
        stop_token_ids=sorted(opening.stopping.stop_token_ids),
        # The model's own end tokens are among the stop tokens where they should end the text.
        ignore_eos=True,
        logprobs=opening.num_top,
        # With the first commit of the answer only.
        prompt_logprobs=asked.num_top if asked is not None and asked.prompt and not done else None,
        structured_outputs=StructuredOutputsParams(grammar="outrider") if options.grammar else None,
        extra_args=_extra(options, done),
        detokenize=False,
        skip_clone=True,
    )
    if options.bad_words:
        sampling._bad_words_token_ids = [list(word) for word in options.bad_words]
    return sampling


def _extra(options: LogitsOptions, done: int) -> dict[str, Any] | None:
    extra: dict[str, Any] = {}
    if done and (options.penalises or options.bad_words):
        extra[COMMITTED] = done
    if options.logit_bias:
        extra[BIAS] = dict(options.logit_bias)
    return {EXTRA: extra} if extra else None
