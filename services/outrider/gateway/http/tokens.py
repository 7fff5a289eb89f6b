"""`/tokenize`, `/detokenize` and `/version` in vLLM's forms, `/v1/messages/count_tokens` in Anthropic's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.errors import InvalidRequest, OutriderError
from outrider.gateway.generation.context_length import check_len
from outrider.gateway.generation.generation import Generator
from outrider.gateway.generation.requests import ChatPrompt, TextPrompt
from outrider.gateway.http.access import ignored_header, sharing, tenant_of
from outrider.gateway.http.anthropic.request import CountTokensRequest
from outrider.gateway.http.errors import HttpError, from_outrider, rename_field
from outrider.gateway.http.openai.messages import message
from outrider.gateway.http.openai.schemas import Body, Ints
from outrider.gateway.http.openai.tools import tool_use
from outrider.gateway.http.reading import BodyReader
from outrider.gateway.tenants.auth import check_model, may_ask
from outrider.gateway.tenants.quotas import prompt_tokens_of
from outrider.gateway.tokenizer.catalog import Model
from outrider.gateway.tokenizer.model import CannotSplit, TooManyTokens
from outrider.gateway.tokenizer.template import TemplateError
from outrider.gateway.tokenizer.threads import TenantThreads
from outrider.limits import check_token_ids
from outrider.protocol.identity import package_version


class _Body(Body):
    model: str | None = None
    """May be omitted if only one model is served."""

    @property
    def num_tokens(self) -> float:
        """About how many tokens are made or read."""
        raise NotImplementedError


class TokenizeRequest(_Body):
    unserved: ClassVar[dict[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "continue_final_message": (False,),
        "mm_processor_kwargs": (),
    }

    prompt: str | None = None
    add_special_tokens: bool = True
    """Around a prompt; a chat template writes them itself."""
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    """Whether the assistant's turn is opened after the messages."""
    return_token_strs: bool = False

    @property
    def num_tokens(self) -> float:
        return prompt_tokens_of(len(self.prompt or str((self.messages, self.tools, self.chat_template_kwargs))))

    def to_prompt(self) -> TextPrompt | ChatPrompt:
        """Raises InvalidRequest or HttpError."""
        if (self.prompt is None) is (self.messages is None):
            raise InvalidRequest("prompt", "has to be given, or messages in its place")
        if self.prompt is not None:
            return TextPrompt(self.prompt)
        messages = tuple(message(f"messages[{i}]", given) for i, given in enumerate(self.messages or ()))
        return ChatPrompt(messages, tools=tool_use(self.tools, None, None), variables=self.chat_template_kwargs)


class DetokenizeRequest(_Body):
    tokens: Ints

    @property
    def num_tokens(self) -> float:
        return len(self.tokens)


Kind = TypeVar("Kind", TokenizeRequest, DetokenizeRequest, CountTokensRequest)
_Answer = tuple[int, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class TokenEndpoints:
    core: Generator
    reader: BodyReader

    async def tokenize(self, request: Request) -> Response:
        return await self._answer(request, TokenizeRequest, self._tokenized)

    async def detokenize(self, request: Request) -> Response:
        return await self._answer(request, DetokenizeRequest, self._detokenized)

    async def count_tokens(self, request: Request) -> Response:
        return await self._answer(request, CountTokensRequest, self._counted)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": package_version()})

    async def _answer(
        self, request: Request, kind: type[Kind], work: Callable[[Kind, Model, TenantThreads], Awaitable[_Answer]]
    ) -> Response:
        """`work`: returns the number of tokens, which the tenant is charged for, and the answer."""
        try:
            body = await self.reader.read(kind, request)
            tenant = tenant_of(request)
            threads = self.core.threads.of(tenant.name)
            async with self.core.reading(tenant, body.num_tokens, sharing(request)) as charge:
                model = await self._model(request, body.model)
                charge.worked = body.num_tokens
                num_tokens, answer = await work(body, model, threads)
                charge.ended(num_tokens, 0)
                response = JSONResponse(answer)
                response.raw_headers.extend(ignored_header(body.ignored))
                return response
        except HttpError as error:
            return error.response(request.url.path)
        except InvalidRequest as error:
            return rename_field(error, body.client_name).response(request.url.path)
        except OutriderError as error:
            return from_outrider(error).response(request.url.path)

    async def _model(self, request: Request, name: str | None) -> Model:
        if name is None:
            await self.core.catalog.refresh()
            names = [served.model for served in self.core.catalog.live if may_ask(tenant_of(request), served.model)]
            if len(names) != 1:
                raise InvalidRequest("model", f"is missing: {len(names)} models are served here")
            [name] = names
        check_model(tenant_of(request), name)
        return await self.core.catalog.get(name)

    async def _tokenized(self, body: TokenizeRequest, model: Model, threads: TenantThreads) -> _Answer:
        special, opens = body.add_special_tokens, body.add_generation_prompt
        spells = model.tokenizer.spell if body.return_token_strs else None
        ids, spelled = await _encoded(body.to_prompt(), model, threads, special=special, opens=opens, spells=spells)
        counts = {"count": len(ids), "max_model_len": model.max_context_len}
        return len(ids), {**counts, "tokens": ids, "token_strs": spelled}

    async def _counted(self, body: CountTokensRequest, model: Model, threads: TenantThreads) -> _Answer:
        ids, _ = await _encoded(body.to_chat(), model, threads)
        return len(ids), {"input_tokens": len(ids)}

    async def _detokenized(self, body: DetokenizeRequest, model: Model, threads: TenantThreads) -> _Answer:
        check_len(model, "tokens", len(body.tokens))
        check_token_ids("tokens", body.tokens, model.vocab_size)
        text = await threads.run(len(body.tokens), lambda: model.tokenizer.decode(body.tokens))
        return len(body.tokens), {"prompt": text}


async def _encoded(
    prompt: TextPrompt | ChatPrompt,
    model: Model,
    threads: TenantThreads,
    *,
    special: bool = True,
    opens: bool = True,
    spells: Callable[[int], str] | None = None,
) -> tuple[list[int], list[str] | None]:
    """The token ids, and each as text if `spells` is given. `special`: around a text; `opens`: the assistant's turn."""
    tokenizer, most = model.tokenizer, model.max_context_len

    def encoded() -> tuple[list[int], list[str] | None]:
        ids = encode(text, most)
        check_len(model, prompt.field, len(ids))
        return ids, [spells(token_id) for token_id in ids] if spells else None

    try:
        if isinstance(prompt, TextPrompt):
            text, encode = prompt.text, tokenizer.encode if special else tokenizer.encode_plain
        else:
            tools = () if prompt.tools is None else prompt.tools.definitions
            text = await threads.rendered(tokenizer.rendering, prompt.messages, tools, prompt.variables, opens=opens)
            encode = tokenizer.encode_plain
        return await threads.run(len(text), encoded)
    except (TemplateError, CannotSplit) as error:
        raise InvalidRequest(prompt.field, str(error)) from error
    except TooManyTokens as error:
        check_len(model, prompt.field, error.at_least)
        raise
