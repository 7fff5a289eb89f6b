"""One model's tokenizer and chat template, as received from a target. No requests, no network."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.message import DecodeError
from tokenizers import Tokenizer

from outrider.gateway.tokenizer.rendering import BoundedTemplate, shared
from outrider.gateway.tokenizer.text import Detokeniser
from outrider.gateway.tokenizer.tool_view import ToolView, find_view
from outrider.gateway.tools.parsers.formats import MARKERS
from outrider.gateway.tools.parsers.reasoning import CLOSE, OPEN, Thought
from outrider.rpc.v1 import tokenizer_pb2
from outrider.token_bytes import TokenBytes

# A template opens the reasoning with its last tokens and a line end, so it is enough to check so many.
_LAST_TOKENS = 16


class TooManyTokens(ValueError):
    """A text certainly has more tokens than allowed."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"at least {at_least} tokens")
        self.at_least = at_least


class CannotSplit(ValueError):
    """The tokenizer's regular expression does not get through a text."""


@dataclass(frozen=True, slots=True)
class Parsers:
    """How to parse a model's answers into messages, if its chat template does not show it, or wrongly."""

    tool_call: str = ""
    """One of `formats.FORMATS`; empty: found from the template."""
    reasoning: bool | None = None
    """None: found from the template."""


BY_TEMPLATE = Parsers()


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """Immutable and safe to use from several threads at once."""

    eos_token_ids: tuple[int, ...]
    token_bytes: TokenBytes
    tokenizer: Tokenizer
    template: BoundedTemplate
    max_bytes_per_token: int | None = None
    """The most bytes of a prompt that become one token; None if unbounded."""
    marked_bytes: TokenBytes = field(default_factory=lambda: TokenBytes(()))
    """Like `token_bytes`, but special tokens that mark reasoning and tool calls have their names as text."""
    view: ToolView = field(default_factory=ToolView)
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """What the model's generation_config.json states for fields that a request leaves out, by their names."""
    reasons: bool = False
    """Whether text between <think> and </think> is reasoning and not part of the answer."""

    @classmethod
    def parse(cls, data: bytes, parsers: Parsers = BY_TEMPLATE) -> ModelTokenizer:
        """From a serialised Tokenizer. Blocks, for about a second with a large vocabulary. Raises ValueError."""
        try:
            sent = tokenizer_pb2.Tokenizer.FromString(data)
            tokenizer = Tokenizer.from_buffer(sent.json)
        except DecodeError as error:
            raise ValueError(f"tokenizer: not a Tokenizer message: {error}") from error
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"tokenizer.json: {error}") from error
        token_bytes = TokenBytes.of_tokenizer(tokenizer)
        template = shared(dict(sent.chat_templates), json.loads(sent.template_variables or "{}"))
        return cls(
            eos_token_ids=tuple(sent.eos_token_ids),
            token_bytes=token_bytes,
            tokenizer=tokenizer,
            template=template,
            max_bytes_per_token=max_bytes_per_token(json.loads(tokenizer.to_str()), token_bytes.table),
            marked_bytes=token_bytes.with_names({tokenizer.token_to_id(name): name for name in MARKERS}),
            view=_view(template, parsers),
            sampling_defaults=json.loads(sent.sampling_defaults or "{}"),
            reasons="</think>" in template.text if parsers.reasoning is None else parsers.reasoning,
        )

    @property
    def tool_format(self) -> str:
        """How the model writes calls, one of `formats.FORMATS`. Empty: it is not known."""
        return self.view.written_in

    @property
    def max_tokens_by_default(self) -> int | None:
        """Of an answer whose request and API say nothing of it."""
        most = self.sampling_defaults.get("max_tokens")
        return None if most is None else int(most)

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Token ids of a plain prompt with the model's special tokens around it. Raises TooManyTokens, CannotSplit."""
        return self._encode(text, max_tokens, add_special_tokens=True)

    def spell(self, token_id: int) -> str:
        """One token as text: a special token by its name; bytes that are no whole character as OpenAI writes them."""
        data = self.token_bytes.of(token_id)
        if not data:
            return str(self.tokenizer.id_to_token(token_id) or "")
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def mark(self, name: str) -> str:
        """The mark `name` in a grammar: an added token, which never matches text there, or else a text."""
        added = self.tokenizer.get_added_tokens_decoder().values()
        return name if any(token.content == name for token in added) else f'"{name}"'

    def thought_after(self, prompt_token_ids: Sequence[int]) -> Thought:
        """Whether the answer may begin with reasoning, after this prompt."""
        if not self.reasons:
            return Thought.NONE
        last = "".join(map(self.spell, prompt_token_ids[-_LAST_TOKENS:])).rstrip()
        if last.endswith(CLOSE):
            return Thought.NONE
        return Thought.OPEN if last.endswith(OPEN) else Thought.FREE

    def decode(self, token_ids: Sequence[int]) -> str:
        """The tokens' text, with special tokens by their names."""
        detokeniser, texts = Detokeniser(self.token_bytes), list[str]()
        for token_id in token_ids:
            name = self.tokenizer.id_to_token(token_id) if token_id in self.token_bytes.silent else None
            texts.append(detokeniser.push(token_id) if name is None else detokeniser.flush() + name)
        return "".join(texts) + detokeniser.flush()

    def encode_plain(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Token ids of a text without special tokens around it. Raises TooManyTokens, CannotSplit."""
        return self._encode(text, max_tokens, add_special_tokens=False)

    def rendering(
        self,
        tenant: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        opens: bool = True,
    ) -> Future[str]:
        """The text of a conversation, for `encode_plain`: up to the opening of the assistant's turn unless that is not
        wanted (`opens`). Its errors: TemplateError.
        """

        return self.template.submit(
            tenant, lambda render: self.view.render(render, messages, tools, variables, opens=opens)
        )

    def check_len(self, text: str, max_tokens: int) -> None:
        """Raises TooManyTokens if the length of `text` proves it. A text with a few tokens too many passes."""
        if self.max_bytes_per_token is None:
            return
        at_least = -(-len(text.encode()) // self.max_bytes_per_token)
        if at_least > max_tokens:
            raise TooManyTokens(at_least)

    def _encode(self, text: str, max_tokens: int | None, *, add_special_tokens: bool) -> list[int]:
        if max_tokens is not None:
            self.check_len(text, max_tokens)
        # A batch of one, because unlike `encode` it releases the GIL.
        try:
            [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except BaseException as error:
            # The library is in Rust, and what panics there is no Exception.
            if type(error).__name__ != "PanicException":
                raise
            raise CannotSplit("the model's tokenizer cannot split it: its regular expression takes too long") from None
        return list(encoding.ids)


def _view(template: BoundedTemplate, parsers: Parsers) -> ToolView:
    if not template.sources:
        return ToolView(written_in=parsers.tool_call or "hermes")
    found = template.submit("", lambda render: find_view(render, template.text)).result()
    return replace(found, written_in=parsers.tool_call, remarks=()) if parsers.tool_call else found


# Factors by which a step may shrink a text in UTF-8. Normal forms: UAX 15, "Maximum Expansion Factors". SentencePiece
# writes a space as U+2581, three bytes; a U+2581 in the prompt counts as a space, one byte.
_SHRINKS = {"NFC": 3, "NFKC": 11, "Replace": 3, "Metaspace": 3}
_KEEPS_TEXT = frozenset({"ByteLevel", "Digits", "Metaspace", "NFC", "NFKC", "Prepend", "Punctuation", "Split"})


def max_bytes_per_token(spec: dict[str, Any], pieces: Collection[bytes]) -> int | None:
    """The most UTF-8 bytes of a text that become one token; None if unbounded.

    `spec` is tokenizer.json, `pieces` the text of every token in the vocabulary.
    """
    added = spec["added_tokens"]
    if any(token["lstrip"] or token["rstrip"] for token in added) or not _covers_every_byte(spec, pieces):
        return None
    steps = [*_steps(spec["normalizer"]), *_steps(spec["pre_tokenizer"])]
    if not all(_keeps_text(step) for step in steps):
        return None
    longest = max(len(piece) for piece in [*pieces, *(token["content"].encode() for token in added)])
    return longest * math.prod(_SHRINKS.get(step["type"], 1) for step in steps)


def _covers_every_byte(spec: dict[str, Any], pieces: Collection[bytes]) -> bool:
    """If not, unknown characters are dropped, or any number of them becomes one unknown token."""
    return spec["model"]["type"] == "BPE" and len({piece for piece in pieces if len(piece) == 1}) == 256


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part["type"] == "Sequence":
        inner = part.get("normalizers") or part.get("pretokenizers") or []
        return [step for one in inner for step in _steps(one)]
    return [part]


def _keeps_text(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(pattern.encode()) <= len(step["content"].encode())
    return step["type"] in _KEEPS_TEXT and step.get("behavior") != "Removed"
