"""Whether a request fits its model's context. Pure.

The messages begin as OpenAI's and vLLM's do: LiteLLM, LangChain and agents know by these words that a conversation has
to be shortened.
"""

from __future__ import annotations

from outrider.errors import InvalidRequest
from outrider.gateway.generation.requests import Generation
from outrider.gateway.tokenizer.catalog import Model


def check_len(model: Model, where: str, num_tokens: int) -> None:
    """Raises InvalidRequest for more tokens than any prompt may have."""
    if num_tokens > model.max_context_len:
        raise _exceeded(model, where, f"it has {num_tokens} tokens.")


def check_room(model: Model, where: str, prompt_len: int) -> None:
    """Raises InvalidRequest for a prompt that leaves no room for an answer."""
    if prompt_len >= model.max_context_len:
        raise too_long(model, where, f"{prompt_len} tokens")


def too_long(model: Model, where: str, tokens: str) -> InvalidRequest:
    """The error for a text of so many `tokens`."""
    return _exceeded(model, where, f"it has {tokens}, and the answer needs room too. Please reduce its length.")


def max_new_tokens(model: Model, prompt_len: int, generation: Generation, default: int | None) -> int:
    """Most output tokens of this request. Raises InvalidRequest with all numbers when the context is too small."""
    room = model.max_context_len - prompt_len
    asked = generation.options.max_tokens
    if default is None:
        default = model.tokenizer.max_tokens_by_default
    if asked is None:
        most = min(room, default) if default is not None else room
        if (least := generation.options.logits.min_tokens) > most:
            raise InvalidRequest("min_tokens", f"{least} is more than the {most} that max_tokens leaves by default")
        return most
    if asked > room:
        parts = f"({prompt_len} in the messages, {asked} in the completion)"
        message = f"you requested {prompt_len + asked} tokens {parts}. Please reduce the length of either."
        raise _exceeded(model, "max_tokens", message)
    return asked


def _exceeded(model: Model, where: str, what: str) -> InvalidRequest:
    message = f"This model's maximum context length is {model.max_context_len} tokens. However, {what}"
    return InvalidRequest(where, message, reason="CONTEXT_LENGTH_EXCEEDED")
