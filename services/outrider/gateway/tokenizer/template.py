"""A model's chat template, rendered as transformers renders it, but without transformers.

Templates have the same functions as in `transformers.utils.chat_template_utils`. They come from checkpoints, so they
run in Jinja's sandbox, and in a gateway in a process of their own (`rendering`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2 import TemplateError as JinjaError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; templates read the first, some of them the second."""
_MAX_ERROR_CHARS = 1000
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that no client may set."""


class TemplateError(ValueError):
    """The chat template refuses these messages, or there is none."""


class ChatTemplate:
    """Safe to use from several threads at once."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, Any]) -> None:
        """`sources`: Jinja texts by name; `variables`: available to each, such as bos_token."""
        self.sources = sources
        self.variables = variables
        self._environment = _environment()
        self._compiled: dict[str, Template] = {}

    @property
    def text(self) -> str:
        """The text of all templates."""
        return "\n".join(self.sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] | None = None,
        *,
        opens: bool = True,
    ) -> str:
        """The conversation, with the opening of the assistant's turn if that is wanted (`opens`). Raises TemplateError.

        `messages`, `tools` and `more` are plain JSON. `more` takes precedence over the model's own variables.
        """
        if not messages:
            raise TemplateError("a conversation needs at least one message")
        try:
            own = {"messages": [_prepared(message) for message in messages], "tools": tools, "documents": None}
            return self._template("tool_use" if tools else "default").render(
                {**self.variables, **(more or {}), **own, "add_generation_prompt": opens}
            )
        except TemplateError:
            raise
        except MemoryError:
            raise
        # A template may raise anything; so may a client's variable, which may be of any type.
        except Exception as error:
            raise TemplateError(f"refused by the model's chat template: {str(error)[:_MAX_ERROR_CHARS]}") from error

    def _template(self, wanted: str) -> Template:
        name = wanted if wanted in self.sources else "default"
        if name not in self.sources:
            raise TemplateError("this model has no chat template; send a plain prompt instead")
        if name not in self._compiled:
            self._compiled[name] = self._environment.from_string(self.sources[name])
        return self._compiled[name]


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without None values, which templates would print, and with reasoning under both names they read."""
    given = {name: value for name, value in message.items() if value is not None}
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own filter, it does not escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise JinjaError(message)


class _Generation(Extension):
    """The tag that marks the assistant's text for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012  # As Jinja types it.

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict` without its attributes, by which a template could leave the sandbox."""

    def __call__(self, *arguments: Any, **more: Any) -> dict[Any, Any]:
        return dict(*arguments, **more)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*arguments: Any, **more: Any) -> None:
        # With Jinja's signature, so that a template may name an attribute `self`.
        self, given = arguments[0], dict(*arguments[1:], **more)
        for name in given:
            _check_attribute(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        Namespace.__setitem__(self, name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")
