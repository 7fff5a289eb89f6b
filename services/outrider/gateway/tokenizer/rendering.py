"""A chat template in a process of its own: it is code of strangers, which may not end, or take all memory.

This file is also that process's program.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from outrider.gateway.tokenizer.template import ChatTemplate, TemplateError
from outrider.runtime.bounded import Answer, BoundedProcess, OutOfBounds, serve
from outrider.runtime.turns import TenantTurns

_CPU_S = 2.0
"""The longest conversations that a body has room for take some 0.2 s."""
_EXTRA_BYTES = 512 << 20
_MAX_CHARS = 32 << 20
"""Of a prompt: JSON in JSON may be six times as long as the body that it came in."""
_TEXT, _FAULT = b"+", b"-"
_MAX_SHARED = 8
Result = TypeVar("Result")


class TemplateOutOfBounds(TemplateError):
    """The template took too much."""


class Render(Protocol):
    """`ChatTemplate.render`, in bounds. Raises TemplateError."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        more: Mapping[str, Any] | None = None,
        *,
        opens: bool = True,
    ) -> str: ...


class BoundedTemplate:
    """Renders one conversation at a time; tenants take turns. Each template has a thread and a process, so that one
    delays no other. They end with it."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, Any]) -> None:
        """As of ChatTemplate."""
        self.sources = sources
        self.variables = variables
        setting = json.dumps([sources, variables]).encode()
        self._process = BoundedProcess(__name__, setting, cpu_s=_CPU_S, extra_bytes=_EXTRA_BYTES)
        self._turns = TenantTurns(1, "render")
        weakref.finalize(self, self._turns.close)

    @property
    def text(self) -> str:
        """The text of all templates."""
        return "\n".join(self.sources.values())

    def submit(self, tenant: str, work: Callable[[Render], Result]) -> Future[Result]:
        """Runs `work` in the template's thread. Only there may it render."""
        process = self._process
        return self._turns.submit(tenant, lambda: work(_render_in(process)))


def shared(sources: Mapping[str, str], variables: Mapping[str, Any]) -> BoundedTemplate:
    """The same for models that have the same template."""
    return _shared(json.dumps([sources, variables]))


@lru_cache(maxsize=_MAX_SHARED)
def _shared(setting: str) -> BoundedTemplate:
    return BoundedTemplate(*json.loads(setting))


def _render_in(process: BoundedProcess) -> Render:
    def render(
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        more: Mapping[str, Any] | None = None,
        *,
        opens: bool = True,
    ) -> str:
        question = json.dumps([messages, tools, more, opens], default=dict)
        try:
            answer = process.ask(question.encode())
        except OutOfBounds as error:
            raise TemplateOutOfBounds(f"ended in the model's chat template: {error}") from error
        if answer[:1] == _FAULT:
            raise TemplateError(answer[1:].decode())
        return answer[1:].decode()

    return render


def _program(setting: bytes) -> Answer:
    sources, variables = json.loads(setting)
    template = ChatTemplate(sources, variables)

    def answer(question: bytes) -> bytes:
        messages, tools, more, opens = json.loads(question)
        try:
            text = template.render(messages, tools, more, opens=opens)
            if len(text) > _MAX_CHARS:
                raise TemplateError(f"the model's chat template makes {len(text)} characters of it")
            return _TEXT + text.encode()
        except UnicodeEncodeError:
            return _FAULT + b"holds half a surrogate pair, which is not text"
        except TemplateError as error:
            return _FAULT + str(error).encode(errors="replace")

    return answer


if __name__ == "__main__":
    serve(_program)
