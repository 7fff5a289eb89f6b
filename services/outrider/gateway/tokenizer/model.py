"""One model's tokenizer and chat template, read from its directory. Knows no request and no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.gateway.tokenizer.bounds import max_bytes_per_token
from outrider.gateway.tokenizer.text import TokenBytes


class TemplateError(ValueError):
    """The chat template refuses these messages, or there is none."""


class TooManyTokens(ValueError):
    """A text is certain to have more tokens than there is room for."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"at least {at_least} tokens")
        self.at_least = at_least


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """Immutable and safe to use from several threads at once."""

    fingerprint: str
    eos_token_ids: tuple[int, ...]
    token_bytes: TokenBytes
    tokenizer: Any
    """A transformers tokenizer with a `tokenizers` backend."""
    max_bytes_per_token: int | None = None
    """The most bytes of a prompt that become one token; None where nothing bounds them."""

    @classmethod
    def load(cls, name: str, path: Path | None) -> ModelTokenizer:
        """Reads `path`, or the checkpoint known as `name`. Blocks: seconds the first time.

        Raises CheckpointError, OSError or ValueError, each naming the file or the reason.
        """
        # Imported here: both take seconds to import, and the gateway serves and answers health checks meanwhile.
        from transformers import AutoTokenizer

        from outrider.engine import checkpoints

        directory = path or checkpoints.resolve(name)
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{directory}/tokenizer.json: missing; only fast tokenizers are served")
        # A checkpoint may ship with truncation switched on, which would shorten prompts silently.
        backend.no_truncation()
        backend.no_padding()
        token_bytes = _token_bytes(backend)
        return cls(
            fingerprint=checkpoints.tokenizer_fingerprint(directory),
            eos_token_ids=_eos_token_ids(checkpoints.eos_token_ids(directory), tokenizer),
            token_bytes=token_bytes,
            tokenizer=tokenizer,
            max_bytes_per_token=max_bytes_per_token(json.loads(backend.to_str()), token_bytes.table),
        )

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Token ids of a plain prompt, with the special tokens this model wants around it. Raises TooManyTokens."""
        return self._encode(text, max_tokens, add_special_tokens=True)

    def spell(self, token_id: int) -> str:
        """One token as text: a special one by its name; bytes that are no text of their own, as OpenAI writes them."""
        data = self.token_bytes.of(token_id)
        if not data:
            return str(self.tokenizer.backend_tokenizer.id_to_token(token_id) or "")
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a piece of text, with nothing around it."""
        return self._encode(text, None, add_special_tokens=False)

    def encode_chat(self, messages: Sequence[Mapping[str, str]], max_tokens: int | None = None) -> list[int]:
        """Token ids of a conversation up to the opening of the assistant's turn. Raises TemplateError or
        TooManyTokens.
        """
        # The template writes the special tokens itself.
        return self._encode(self.render(messages), max_tokens, add_special_tokens=False)

    def check_len(self, text: str, max_tokens: int) -> None:
        """Raises TooManyTokens where the length of `text` tells. Texts of a few tokens too many pass."""
        if self.max_bytes_per_token is None:
            return
        at_least = -(-len(text.encode()) // self.max_bytes_per_token)
        if at_least > max_tokens:
            raise TooManyTokens(at_least)

    def _encode(self, text: str, max_tokens: int | None, *, add_special_tokens: bool) -> list[int]:
        if max_tokens is not None:
            self.check_len(text, max_tokens)
        # A batch of one: unlike `encode` it lets other threads run meanwhile.
        [encoding] = self.tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        from jinja2 import TemplateError as JinjaError

        if not self.tokenizer.chat_template:
            raise TemplateError("this model has no chat template; send a plain prompt instead")
        try:
            rendered = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (JinjaError, TypeError, ValueError) as error:
            raise TemplateError(f"refused by the model's chat template: {error}") from error
        return str(rendered)


def _eos_token_ids(declared: tuple[int, ...], tokenizer: Any) -> tuple[int, ...]:
    ids = set(declared)
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    return tuple(sorted(ids))


def _token_bytes(backend: Any) -> TokenBytes:
    size = backend.get_vocab_size(with_added_tokens=True)
    # Added tokens may leave gaps in the ids, so the highest id bounds the table and not the count.
    highest = max(backend.get_vocab(with_added_tokens=True).values(), default=size - 1)
    specials = [i for i, token in backend.get_added_tokens_decoder().items() if token.special]
    pieces = [backend.id_to_token(i) for i in range(highest + 1)]
    return TokenBytes.build(pieces, json.loads(backend.to_str())["decoder"], specials)
