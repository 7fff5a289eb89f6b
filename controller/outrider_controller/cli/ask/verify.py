"""outrider verify: asks for an answer again without drafts, and compares it with what a receipt says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from outrider.protocol.receipts import BadReceipt, checked, digest, public_key
from outrider.rpc.v1 import generation_pb2 as generation
from outrider.rpc.v1 import receipt_pb2, router_pb2

from outrider_controller.cli.ask.client import Gateway, GatewayAnswer, apply_prompt
from outrider_controller.cli.asking import NumberRange
from outrider_controller.cli.clusters.control import context_option, endpoint_option
from outrider_controller.cli.exits import CommandError

_PIECE = 16
"""Tokens of the output that one request says again. All pieces of a text run together, each after those before it."""
_AT_ONCE = 8


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
    Every argument that is @FILE is read from that file. Without --output, the receipt's digest stands for the answer.
    With token ids as --output, pieces of the answer are checked together, which takes less time.

    Exit code 0 if all is equal. Exit code 1, and one line that names what differs, if the signature, a digest or a
    token differs, or if no target has the receipt's revision.
    """
    asked = generation.GenerateRequest()
    _apply(asked, _read(prompt), raw=raw, system=system)
    said = None if output is None else _read(output)
    pem = None if key is None else Path(key).read_bytes()
    try:
        found = asyncio.run(_verify(grpc, _read(receipt), asked, said, pem, timeout))
    except BadReceipt as error:
        raise CommandError(str(error), reason="BAD_RECEIPT") from None
    [revision] = found.model_revisions
    given = f" after {found.resumed_tokens} that came with the request" if found.resumed_tokens else ""
    drafts = ", ".join(found.draft_kinds) or "none"
    click.echo(f"equal: {found.output_tokens - found.resumed_tokens} tokens{given}")
    click.echo(f"{found.model} of revision {revision}; drafts in the answer: {drafts}, in the replay: none")


def _read(argument: str) -> str:
    return Path(argument[1:]).read_text() if argument.startswith("@") else argument


def _ids(text: str) -> list[int] | None:
    """The token ids of a JSON list; None if the text is none."""
    found = _list(text)
    return found if found and all(type(each) is int and 0 <= each < 2**32 for each in found) else None


def _list(text: str) -> list[Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def _apply(request: generation.GenerateRequest, prompt: str, *, raw: bool, system: str) -> None:
    messages = _list(prompt) or []
    if (ids := _ids(prompt)) is not None:
        request.tokens.token_ids.extend(ids)
    elif messages and all(isinstance(each, dict) and isinstance(each.get("content"), str) for each in messages):
        for each in messages:
            request.chat.messages.add(role=str(each.get("role")), content=each["content"])
    else:
        apply_prompt(request, prompt, raw=raw, system=system)


async def _verify(
    address: str,
    receipt: str,
    asked: generation.GenerateRequest,
    output: str | None,
    pem: bytes | None,
    timeout_s: float,
) -> receipt_pb2.Receipt:
    async with Gateway(address) as gateway:
        own = public_key((await gateway.receipt_key()).encode())
        found = checked(receipt, own if pem is None else public_key(pem))
        if len(found.model_revisions) != 1:
            revisions = ", ".join(found.model_revisions) or "none"
            raise BadReceipt(f"the answer is not of one revision, so no target can generate it again: {revisions}")
        replay = _Replay(gateway, found, asked, own, timeout_s)
        ids = None if output is None else _ids(output)
        if ids is not None:
            await replay.compare_ids(ids)
        else:
            await replay.compare_text(output)
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
        first, end = self.receipt.resumed_tokens, len(output)
        room = asyncio.Semaphore(_AT_ONCE)

        async def piece(start: int) -> list[int]:
            async with room:
                return (await self._say(output[:start], min(start + _PIECE, end))).token_ids

        pieces = await asyncio.gather(*map(piece, range(first, end, _PIECE)))
        for start, said in zip(range(first, end, _PIECE), pieces, strict=True):
            claimed = output[start : start + _PIECE]
            for place, token in enumerate(claimed):
                if place >= len(said) or said[place] != token:
                    other = said[place] if place < len(said) else "no more"
                    raise _differs(start + place, f"the output has {token}, the target generates {other}")
        if digest(output) != self.receipt.output_sha256:
            raise BadReceipt(
                f"the target generates these {end} tokens too, but the receipt has {self.receipt.output_tokens}"
            )

    async def compare_text(self, output: str | None) -> None:
        """The whole answer in one request, because a text may be split into tokens in several ways."""
        if self.receipt.resumed_tokens:
            raise BadReceipt("the answer continues tokens that came with its request: give --output as token ids")
        texts: list[str] = []
        answer = await self._say((), self.receipt.output_tokens, lambda chunk: texts.append(chunk.text))
        if output is not None and answer.text != output:
            at = next((i for i in range(len(texts)) if not output.startswith("".join(texts[: i + 1]))), len(texts))
            raise _differs(at, "the output's text differs from the target's")
        if digest(answer.token_ids) != self.receipt.output_sha256:
            raise BadReceipt("not equal: the target generates other tokens than those of the receipt")

    async def _say(self, before: Sequence[int], end: int, show: Any = lambda chunk: None) -> GatewayAnswer:
        """The tokens from those `before` to the `end`, with proof that a target of this revision said them plainly."""
        answer = await self.gateway.answer(self._request(before, end), self.timeout_s, show)
        said = checked(answer.receipt, self.own)
        if said.prompt_sha256 != self.receipt.prompt_sha256:
            ours, theirs = f"{said.prompt_tokens} tokens, {said.prompt_sha256}", self.receipt.prompt_sha256
            raise BadReceipt(f"the prompt is not that of the receipt: it has {ours}, the receipt {theirs}")
        if list(said.model_revisions) != list(self.receipt.model_revisions):
            [wanted], others = self.receipt.model_revisions, ", ".join(said.model_revisions)
            raise BadReceipt(f"the receipt is of revision {wanted}; there is only {others}")
        if said.draft_kinds:
            raise BadReceipt(f"the replay was not plain: {', '.join(said.draft_kinds)} drafted for it")
        return answer

    def _request(self, before: Sequence[int], end: int) -> generation.GenerateRequest:
        receipt, sampling = self.receipt, self.receipt.sampling
        request = generation.GenerateRequest(
            model=receipt.model, resume_token_ids=before, resume_revision=receipt.model_revisions[0]
        )
        request.MergeFrom(self.asked)
        request.options.MergeFrom(
            generation.GenerationOptions(
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=sampling.seed,
                max_tokens=end,
                stop=receipt.stop,
                stop_token_ids=receipt.stopping.stop_token_ids,
                # Those of the model are among the receipt's stop tokens, if they ended the answer.
                ignore_eos=True,
                speculation=router_pb2.SPECULATION_MODE_OFF,
                receipt=True,
                logits=receipt.logits if receipt.HasField("logits") else None,
            )
        )
        return request


def _differs(place: int, how: str) -> BadReceipt:
    return BadReceipt(f"not equal: token {place} of the output (from 0): {how}")
