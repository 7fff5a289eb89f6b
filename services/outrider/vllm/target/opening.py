"""From an opening to vLLM's request. What vLLM cannot do is refused here, with the name of the field."""

from __future__ import annotations

import time
from typing import Any

from vllm import envs
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request
from vllm.v1.utils import ConstantList
from vllm.v1.worker.gpu.sample.logit_bias import (
    MAX_NUM_ALLOWED_TOKEN_IDS,
    MAX_NUM_LOGIT_BIAS_TOKENS,
    MAX_NUM_STOP_TOKEN_IDS,
)

from outrider.errors import NotSupported
from outrider.options.logits import LogitsOptions
from outrider.sequence.spec import SequenceSpec
from outrider.target.requests.limits import Limits

_MIN_TEMPERATURE = 0.01
"""vLLM raises lower ones to this."""
_HALF = 1 << 63


def check_supported(spec: SequenceSpec) -> None:
    """Raises NotSupported for what another engine would do and vLLM does not. What is beyond the bounds of vLLM's
    sampler would end its engine."""
    params, options = spec.params, spec.logits or LogitsOptions()
    # Rounded, because the 32-bit float nearest to 0.01 is less than 0.01.
    if 0 < round(params.temperature, 6) < _MIN_TEMPERATURE:
        raise NotSupported("sampling.temperature", f"vLLM samples from {_MIN_TEMPERATURE:g} on; 0 is greedy")
    stops = spec.stop_token_ids if options.min_tokens else ()
    words, most_words = options.bad_words, envs.VLLM_MAX_NUM_BAD_WORDS
    for field, count, most in (
        ("logits.bias_token_ids", len(options.logit_bias), MAX_NUM_LOGIT_BIAS_TOKENS),
        ("logits.allowed_token_ids", len(options.allowed_token_ids), MAX_NUM_ALLOWED_TOKEN_IDS),
        ("stopping.stop_token_ids", len(stops), MAX_NUM_STOP_TOKEN_IDS),
        ("logits.bad_words", len(words), most_words),
        ("logits.bad_words", sum(map(len, words)), envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
    ):
        if count > most:
            raise NotSupported(field, f"{count} are more than vLLM takes, which is {most}")


def request_of(request_id: str, spec: SequenceSpec, tokens: list[int], limits: Limits, block_hasher: Any) -> Request:
    """The request that continues the opening after its committed tokens, which are output for vLLM too. It extends
    `tokens`, those of the opening, instead of a list of its own."""
    request = Request(
        request_id,
        list(spec.prompt),
        sampling_of(spec, limits),
        None,
        arrival_time=time.time(),
        cache_salt=spec.salt.hex() or None,
        block_hasher=block_hasher,
    )
    if spec.committed:
        request.append_output_token_ids(list(spec.committed))
    request._all_token_ids, request.all_token_ids = tokens, ConstantList(tokens)
    return request


def sampling_of(spec: SequenceSpec, limits: Limits) -> SamplingParams:
    params, options, asked = spec.params, spec.logits or LogitsOptions(), spec.logprobs
    most = min(spec.max_new_tokens, limits.max_context_len - len(spec.prompt))
    sampling = SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=None if params.greedy else _seed(params.seed),
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        logit_bias=dict(options.logit_bias) or None,
        allowed_token_ids=list(options.allowed_token_ids) or None,
        min_tokens=min(options.min_tokens, most),
        max_tokens=most,
        stop_token_ids=sorted(spec.stop_token_ids),
        # The model's own end tokens are among the stop tokens where they should end the text.
        ignore_eos=True,
        logprobs=spec.num_top,
        # With the first commit of the answer only.
        prompt_logprobs=asked.num_top if asked is not None and asked.prompt and not spec.committed else None,
        structured_outputs=StructuredOutputsParams(grammar="outrider") if options.grammar else None,
        detokenize=False,
        skip_clone=True,
    )
    if options.bad_words:
        sampling._bad_words_token_ids = [list(word) for word in options.bad_words]
    return sampling


def _seed(seed: int) -> int:
    """vLLM's seeds have a sign, and with -1 it draws one."""
    signed = (seed + _HALF) % (2 * _HALF) - _HALF
    return signed if signed != -1 else -2
