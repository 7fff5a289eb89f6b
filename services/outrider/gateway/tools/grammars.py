"""Makes the grammars of requests in processes whose time and memory the kernel bounds. This file is also their program.

What a grammar costs to read and to check shows only when it is done, and strangers write them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import pickle
import threading
from collections import OrderedDict
from functools import cached_property

from outrider.errors import InvalidRequest, NotSupported
from outrider.gateway.tools.parsers.formats import MARKERS
from outrider.gateway.tools.parsers.reasoning import Thought
from outrider.gateway.tools.structured import Grammatical, Marks, NamedMarks
from outrider.gateway.tools.tool_grammar import after_thought
from outrider.runtime.bounded import Answer, BoundedProcess, OutOfBounds, serve
from outrider.runtime.turns import TenantTurns, deep_stacks

_THREADS = 2
_NICE = 10
_CPU_S = 2.0
"""The largest grammar that fits a message takes about a second on a slow core."""
_BYTES = 256 << 20
_MAX_CACHED = 128
_KEPT_S = 60.0
"""A tenant's texts are in them."""
_ERRORS = {"invalid": InvalidRequest, "not supported": NotSupported}


class GrammarMaker:
    """Tenants take turns with two processes, which start with the first grammars. Remembers the last answers.

    `close` it.
    """

    def __init__(self) -> None:
        self._processes = threading.local()
        self._answers: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()
        """By the tenant, to whom alone it may show that a question was asked before, and the question's hash."""

    async def make(self, asked: Grammatical, marks: Marks, thought: Thought, tenant: str) -> str:
        """In llguidance's notation, with the reasoning that may come before it. Raises InvalidRequest or NotSupported
        with the client's field."""
        question = pickle.dumps((asked, NamedMarks.of(marks, MARKERS), thought))
        key = tenant, hashlib.blake2b(question, digest_size=16).digest()
        if (answer := self._known(key)) is None:
            try:
                answer = await asyncio.wrap_future(self._turns.submit(tenant, lambda: self._ask(question)))
            except OutOfBounds:
                answer = _answer("is too complex: it takes too much time or memory to read", "invalid", asked.field)
            self._answers[key] = answer
            asyncio.get_running_loop().call_later(_KEPT_S, self._answers.pop, key, None)
            if len(self._answers) > _MAX_CACHED:
                self._answers.popitem(last=False)
        found = json.loads(answer)
        if error := _ERRORS.get(found["error"]):
            raise error(found["field"], found["text"])
        return str(found["text"])

    def _known(self, key: tuple[str, bytes]) -> bytes | None:
        if key in self._answers:
            self._answers.move_to_end(key)
        return self._answers.get(key)

    def close(self) -> None:
        """Running work ends by itself."""
        if "_turns" in self.__dict__:
            self._turns.close()

    @cached_property
    def _turns(self) -> TenantTurns:
        return TenantTurns(_THREADS, "make grammar", most_per_tenant=_THREADS - 1, nice=_NICE)

    def _ask(self, question: bytes) -> bytes:
        process: BoundedProcess | None = getattr(self._processes, "one", None)
        if process is None:
            # One for each thread, because it ends with the thread that starts it.
            process = self._processes.one = BoundedProcess(__name__, cpu_s=_CPU_S, extra_bytes=_BYTES, yields=True)
        return process.ask(question)


def _answer(text: str, error: str = "", field: str | None = None) -> bytes:
    return json.dumps({"text": text, "error": error, "field": field}).encode()


def make(setting: bytes) -> Answer:
    """The program."""

    def answer(question: bytes) -> bytes:
        asked, marks, thought = pickle.loads(question)  # noqa: S301  our own process has written it
        try:
            return _answer(after_thought(asked.to_grammar(marks), marks, thought))
        except InvalidRequest as error:
            return _answer(error.message, "invalid", error.field)
        except NotSupported as error:
            return _answer(error.message, "not supported", error.field)
        except RecursionError:
            return _answer("is nested too deeply", "invalid", asked.field)

    return answer


if __name__ == "__main__":
    with deep_stacks():
        serving = threading.Thread(target=serve, args=[make])
        serving.start()
    serving.join()
