"""outrider verify: asks for an answer again without drafts, and compares it with what a receipt says."""

from __future__ import annotations

import asyncio
import codecs
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from outrider.protocol.receipts import BadReceipt, checked, digest, public_key
from outrider.rpc.v1 import generation_pb2 as generation
from outrider.rpc.v1 import receipt_pb2, router_pb2, sequence_pb2

from outrider_controller.cli.asking import NumberRange
from outrider_controller.cli.client import Gateway, GatewayAnswer, apply_prompt
from outrider_controller.cli.clusters.control import context_option, endpoint_option
from outrider_controller.cli.exits import CommandError

_PIECE = 16
"""Tokens of the output that one request says again. All pieces of a text run together, each after those before it."""
_AT_ONCE = 8
_NO_ROOM = ("QUOTA_EXCEEDED", "OVERLOADED")
_AGAIN_S = 0.25
_SHOWN = 24
"""Bytes of the output that are quoted where it differs."""


@click.command("verify")
@click.argument("receipt")
@click.option("--prompt", required=True, metavar="TEXT", help="As asked: a text, a JSON list of messages or token ids.")
@click.option("--output", default=None, metavar="TEXT", help="As answered: a text, or a JSON list of token ids.")
@click.option("--raw", is_flag=True, help="The prompt was continued as text, without the chat template.")
@click.option("--system", default="", metavar="TEXT", help="The system message that came before the prompt.")
@click.option("--key", default=None, metavar="FILE", help="The public key, in PEM. Default: that of the gateway.")
@context_option
@endpoint_option("--gateway", "grpc", "OUTRIDER_GATEWAY", "gRPC address to ask")
@click.option("--timeout", type=NumberRange(0, min_open=True), default=600.0, show_default=True, metavar="S")
def verify(
    receipt: str,
    prompt: str,
    output: str | None,
    raw: bool,
    system: str,
    key: str | None,
    grpc: str,
    timeout: float,
) -> None:
    """Check the RECEIPT of an answer: its signature, its digests, and every token.

    A target of the receipt's revision generates the answer again with the receipt's sampling and seed, without
    drafts.
    Every argument that is @FILE is read from that file, byte for byte. Without --output, the receipt's digest stands
    for the answer. With token ids as --output, pieces of the answer are checked together, which takes less time.

    Exit code 0 if all is equal. Exit code 1, and one line that names what differs, if the signature, a digest or a
    token differs, or if no target has the receipt's revision.
    """
    said = None if output is None else _read("--output", output)
    pem = None if key is None else Path(key).read_bytes()
    given_prompt = _Prompt(_read("--prompt", prompt), raw, system)
    try:
        found = asyncio.run(_verify(grpc, _read("RECEIPT", receipt), given_prompt, said, pem, timeout))
    except BadReceipt as error:
        raise CommandError(str(error), reason="BAD_RECEIPT") from None
    revision = ", then ".join(found.model_revisions) or "that is unknown"
    given = f" after {found.resumed_tokens} that came with the request" if found.resumed_tokens else ""
    drafts = ", ".join(found.draft_kinds) or "none"
    click.echo(f"equal: {found.output_tokens - found.resumed_tokens} tokens{given}")
    click.echo(f"{found.model} of revision {revision}; drafts in the answer: {drafts}, in the replay: none")


def _read(name: str, argument: str) -> str:
    if not argument.startswith("@"):
        return argument
    try:
        # Not read_text: a model's carriage returns are part of its text.
        return Path(argument[1:]).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{name}: {argument[1:]} is not UTF-8: {error}") from None


def _ids(text: str) -> list[int] | None:
    """The token ids of a JSON list; None if the text is none."""
    found = _list(text)
    return found if found and all(type(each) is int and 0 <= each < 2**32 for each in found) else None


def _list(text: str) -> list[Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str
    raw: bool
    system: str

    def asked(self, sha256: str) -> generation.GenerateRequest:
        """`sha256`: of its tokens. A text may look like a list of token ids, and then has another one."""
        request, messages = generation.GenerateRequest(), _list(self.text) or []
        if (ids := _ids(self.text)) is not None and digest(ids) == sha256:
            request.tokens.token_ids.extend(ids)
        elif not self.raw and messages and all(map(_is_message, messages)):
            for each in messages:
                request.chat.messages.add(role=str(each.get("role")), content=_content(each))
        else:
            apply_prompt(request, self.text, raw=self.raw, system=self.system)
        return request


def _is_message(given: Any) -> bool:
    return isinstance(given, dict) and _content(given) is not None


def _content(message: dict[str, Any]) -> str | None:
    """A text, or the texts of its parts, which the gateway joins too."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        whole = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        return "".join(map(str, texts)) if whole else None
    return content if isinstance(content, str) else None


async def _verify(
    address: str,
    receipt: str,
    prompt: _Prompt,
    output: str | None,
    pem: bytes | None,
    timeout_s: float,
) -> receipt_pb2.Receipt:
    async with Gateway(address) as gateway:
        own = public_key((await gateway.receipt_key()).encode())
        found = checked(receipt, own if pem is None else public_key(pem))
        if len(found.revision_starts) != len(found.model_revisions):
            if len(found.model_revisions) != 1:
                revisions = ", ".join(found.model_revisions) or "none"
                raise BadReceipt(f"the answer is not of one revision, nor does the receipt name its parts: {revisions}")
            # An older release signed it.
            found.revision_starts[:] = [found.resumed_tokens]
        replay = _Replay(gateway, found, prompt.asked(found.prompt_sha256), own, timeout_s)
        ids = None if output is None else _ids(output)
        if ids is not None and digest(ids) == found.output_sha256:
            await replay.compare_ids(ids)
        else:
            await replay.compare_text(output, ids)
        return found


@dataclass(frozen=True, slots=True)
class _Replay:
    """Says the tokens of a receipt again, plainly. Its methods raise BadReceipt for what differs."""

    gateway: Gateway
    receipt: receipt_pb2.Receipt
    asked: generation.GenerateRequest
    """With the prompt."""
    own: Ed25519PublicKey
    """Of the gateway that answers the replay."""
    timeout_s: float
    """Of each request."""

    async def compare_ids(self, output: Sequence[int]) -> None:
        """Every token after the output's own tokens before it."""
        end = len(output)
        room = asyncio.Semaphore(_AT_ONCE)
        parts = [
            (revision, start, min(start + _PIECE, until))
            for revision, begin, until in self._parts(end)
            for start in range(begin, until, _PIECE)
        ]
        if not parts:
            # It ended with what came with its request. The prompt is compared all the same.
            parts = [("", end, end)]

        async def piece(revision: str, start: int, until: int) -> list[int]:
            async with room:
                return (await self._say(revision, output[:start], until)).token_ids

        pieces = await asyncio.gather(*(piece(*part) for part in parts))
        for (_, start, until), said in zip(parts, pieces, strict=True):
            claimed = output[start:until]
            for place, token in enumerate(claimed):
                if place >= len(said) or said[place] != token:
                    other = said[place] if place < len(said) else "no more"
                    raise _differs(start + place, f"the output has {token}, the target generates {other}")
        if digest(output) != self.receipt.output_sha256:
            raise BadReceipt(
                f"the target generates these {end} tokens too, but the receipt has {self.receipt.output_tokens}"
            )

    async def compare_text(self, output: str | None, ids: Sequence[int] | None) -> None:
        """The whole answer in one request, because a text may be split into tokens in several ways. `ids`: of a text
        that is a list of such.
        """
        if self.receipt.resumed_tokens and ids is None:
            raise BadReceipt("the answer continues tokens that came with its request: give --output as token ids")
        if output is not None and ids is None and len(self.receipt.model_revisions) > 1:
            raise BadReceipt("the answer is of several revisions: give --output as token ids, or leave it out")
        if self.receipt.resumed_tokens and ids is not None:
            await self.compare_ids(ids)
            return
        said, text = await self._say_all(stops=True)
        if len(said) < self.receipt.output_tokens and self.receipt.stop:
            # Of an answer with reasoning or calls, stop strings end the content alone.
            said, text = await self._say_all(stops=False)
        if output is not None and ids is None and not text.startswith(echoed := await self._echoed()):
            output = output.removeprefix(echoed)
        if ids is not None and text != output:
            await self.compare_ids(ids)
        elif output is not None and text != output:
            raise await self._text_differs(output, said)
        if digest(said) != self.receipt.output_sha256:
            raise BadReceipt("not equal: the target generates other tokens than those of the receipt")

    async def _echoed(self) -> str:
        """What `echo` puts before an answer."""
        if self.asked.WhichOneof("prompt") == "tokens":
            pieces = await self.gateway.token_bytes(self.receipt.model, self.asked.tokens.token_ids, chat=False)
            return b"".join(pieces).decode(errors="replace")
        return self.asked.text

    async def _say_all(self, *, stops: bool) -> tuple[list[int], str]:
        said, text = list[int](), ""
        for revision, _, end in self._parts(self.receipt.output_tokens):
            answer = await self._say(revision, said, end, stops=stops)
            said, text = said + answer.token_ids, text + answer.text
        return said, text

    async def _text_differs(self, output: str, said: Sequence[int]) -> BadReceipt:
        """Names the first token whose text is not the output's."""
        pieces = await self.gateway.token_bytes(
            self.receipt.model, said, chat=self.asked.WhichOneof("prompt") == "chat"
        )
        place, at = first_difference(output, pieces)
        there = (
            repr(output.encode()[at : at + _SHOWN].decode(errors="replace")) if at < len(output.encode()) else "no more"
        )
        ours = "no more" if place == len(said) else f"{said[place]}, {pieces[place].decode(errors='replace')!r}"
        return _differs(place, f"the text differs: the output has {there}, the target generates {ours}")

    def _parts(self, end: int) -> list[tuple[str, int, int]]:
        """Each revision, with the places of its first token and of the one after its last."""
        starts = list(self.receipt.revision_starts)
        ends = [min(start, end) for start in [*starts[1:], end]]
        return list(zip(self.receipt.model_revisions, starts, ends, strict=False))

    async def _say(self, revision: str, before: Sequence[int], end: int, *, stops: bool = False) -> GatewayAnswer:
        """The tokens from those `before` to the `end`, with proof that a target of this revision said them plainly."""
        answer = await self._answer(self._request(revision, before, end, stops=stops))
        said = checked(answer.receipt, self.own)
        if said.prompt_sha256 != self.receipt.prompt_sha256:
            ours, theirs = f"{said.prompt_tokens} tokens, {said.prompt_sha256}", self.receipt.prompt_sha256
            raise BadReceipt(f"the prompt is not that of the receipt: it has {ours}, the receipt {theirs}")
        if len(before) < end and list(said.model_revisions) != [revision]:
            others = ", ".join(said.model_revisions)
            raise BadReceipt(f"the receipt is of revision {revision}; there is only {others}")
        if said.draft_kinds:
            raise BadReceipt(f"the replay was not plain: {', '.join(said.draft_kinds)} drafted for it")
        return answer

    async def _answer(self, request: generation.GenerateRequest) -> GatewayAnswer:
        """Asks again while there is no room: a quota may allow fewer requests at once than there are pieces."""
        until_s = time.monotonic() + self.timeout_s
        while True:
            try:
                return await self.gateway.answer(request, self.timeout_s)
            except CommandError as refused:
                if refused.reason not in _NO_ROOM or time.monotonic() > until_s:
                    raise
            await asyncio.sleep(_AGAIN_S)

    def _request(self, revision: str, before: Sequence[int], end: int, *, stops: bool) -> generation.GenerateRequest:
        receipt, sampling = self.receipt, self.receipt.sampling
        request = generation.GenerateRequest(model=receipt.model, resume_token_ids=before, resume_revision=revision)
        logits = None
        if receipt.HasField("logits"):
            logits = sequence_pb2.LogitsOptions()
            logits.CopyFrom(receipt.logits)
            # No token before the end is chosen otherwise by it.
            logits.min_tokens = min(logits.min_tokens, end)
        request.MergeFrom(self.asked)
        request.options.MergeFrom(
            generation.GenerationOptions(
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=sampling.seed,
                max_tokens=end,
                stop=receipt.stop if stops else (),
                stop_token_ids=receipt.stopping.stop_token_ids,
                # Those of the model are among the receipt's stop tokens, if they ended the answer.
                ignore_eos=True,
                speculation=router_pb2.SPECULATION_MODE_OFF,
                receipt=True,
                # Without logits the receipt says that there is none, whatever the model's default.
                repetition_penalty=1.0 if logits is None else None,
                logits=logits,
            )
        )
        return request


def _differs(place: int, how: str) -> BadReceipt:
    return BadReceipt(f"not equal: token {place} of the output (from 0): {how}")


def first_difference(text: str, tokens: Sequence[bytes]) -> tuple[int, int]:
    """The first of the tokens that `text` does not have, and the byte of the text at which it should begin."""
    whole, at, began = text.encode(), 0, 0
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for place, token in enumerate(tokens):
        certain = decoder.decode(token).encode()
        # The beginning of a character, which shows as U+FFFD if the rest of it never comes.
        held = decoder.getstate()[0]
        began, at = at, at + len(certain)
        if not (whole.startswith(certain, began) and whole.startswith((held, "\ufffd".encode()), at)):
            return place, began
    return len(tokens), at
