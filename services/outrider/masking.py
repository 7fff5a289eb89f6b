"""Masks secrets in a configuration that is shown: keys, passwords, credentials in URLs. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

MASK = "***"
_SECRET_NAME = re.compile(r"(^|_)(keys?|secrets?|passwords?|credentials?|salt)($|_)")

_SECRET_OPTION = re.compile(r"(^|[_-])((api)?keys?|secrets?|passwords?|tokens?|credentials?|signature|sig)($|[_-])")


def holds_password(text: str) -> bool:
    """Whether this is a URL with a password before its host, or with a query option whose name marks a secret."""
    _, separator, rest = text.partition("://")
    if not separator:
        return False
    authority, _, query = rest.partition("?")
    login = authority.partition("/")[0].rpartition("@")[0]
    options = (one.partition("=")[0].lower() for one in query.split("&"))
    return ":" in login or any(_SECRET_OPTION.search(one) and not one.endswith("_file") for one in options)


def masked(value: Any, name: str = "") -> Any:
    """A configuration as JSON values, with secrets masked: fields named as secrets, bytes, credentials in URLs."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, bytes) or (_SECRET_NAME.search(name) and not name.endswith("_file")):
        return MASK if value else ""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: masked(getattr(value, f.name), f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [masked(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, int | float):
        return value
    return _masked_url(str(value))


def _masked_url(text: str) -> str:
    scheme, separator, rest = text.partition("://")
    if not separator:
        return text
    authority, slash, path = rest.partition("/")
    path, question, query = path.partition("?")
    host = authority.rpartition("@")[2]
    user = f"{MASK}@" if "@" in authority else ""
    return f"{scheme}://{user}{host}{slash}{path}{question}{MASK if query else ''}"
