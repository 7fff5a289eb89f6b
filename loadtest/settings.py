"""The profile of a load test: a YAML file of `profiles/` as frozen dataclasses. Uses no Locust and no network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from loadtest.outcomes import Slo
from loadtest.shapes import SHAPES, Shape

PROFILES = Path(__file__).parent / "profiles"
PROTOCOLS = ("http", "grpc")
ENDPOINTS = ("chat/completions", "completions", "responses")
SPECULATION = ("auto", "on", "off")
ROLES = ("target", "draft", "router")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A group of users with the same kind of requests."""

    name: str
    protocol: str = "http"
    endpoint: str = "chat/completions"
    """Path in the HTTP API, below /v1."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of its HTTP requests, such as tools, response_format and logprobs."""
    weight: int = 1
    """Weight of its users among all users."""
    categories: tuple[str, ...] = ()
    """Categories of the prompt file that it uses. If the file has none of them, tenants get its prompts in turn."""
    api_key_env: str = ""
    """Environment variable with its API key; empty: no key is sent."""
    max_tokens: int = 64
    temperature: float = 0.0
    speculation: str = "auto"
    wait_s: tuple[float, float] = (0.0, 0.0)
    """Pause of a user between requests, in seconds: uniform between these."""

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol: {self.protocol!r} is not one of {', '.join(PROTOCOLS)}")
        if self.endpoint not in ENDPOINTS:
            raise ValueError(f"endpoint: {self.endpoint!r} is not one of {', '.join(ENDPOINTS)}")
        if not isinstance(self.body, Mapping):
            raise ValueError("body: has to be a mapping")
        if self.protocol != "http" and (self.body or self.endpoint != ENDPOINTS[0]):
            raise ValueError("endpoint, body: are for the protocol http")
        if self.speculation not in SPECULATION:
            raise ValueError(f"speculation: {self.speculation!r} is not one of {', '.join(SPECULATION)}")
        if self.weight < 1 or self.max_tokens < 1:
            raise ValueError("weight, max_tokens: must be at least 1")
        if len(self.wait_s) != 2 or not 0 <= self.wait_s[0] <= self.wait_s[1] < math.inf:
            raise ValueError("wait_s: must be two numbers, the least and the most")


@dataclass(frozen=True, slots=True)
class Faults:
    """Workers to kill during the test."""

    every_s: float
    roles: tuple[str, ...] = ("draft", "target")
    """One worker of each in turn."""

    def __post_init__(self) -> None:
        if not self.every_s > 0:
            raise ValueError("every_s: must be above 0")
        if unknown := set(self.roles) - set(ROLES):
            raise ValueError(f"roles: {', '.join(sorted(unknown))} is not one of {', '.join(ROLES)}")
        if not self.roles:
            raise ValueError("roles: at least one")


@dataclass(frozen=True, slots=True)
class Stack:
    """Workers of the stack that is started for the test."""

    targets: int = 1
    drafts: int = 1

    def __post_init__(self) -> None:
        if self.targets < 1 or self.drafts < 0:
            raise ValueError("targets: must be at least 1; drafts: must not be negative")


@dataclass(frozen=True, slots=True)
class Profile:
    name: str
    shape: Shape
    tenants: tuple[Tenant, ...]
    slo: Slo = field(default_factory=Slo)
    warm_up_s: float = 0.0
    """Requests sent earlier are not counted."""
    min_goodput: float = 0.0
    """Share of the requests, 0 to 1, that must meet the SLO for the test to pass."""
    faults: Faults | None = None
    stack: Stack = field(default_factory=Stack)
    """Given none, it has two of each with faults: new requests wait while a single target restarts."""
    prompts: str = "prompts.jsonl"
    """A file that `read_prompts` can read; relative to this folder unless absolute."""

    def __post_init__(self) -> None:
        if not self.tenants:
            raise ValueError("tenants: at least one")
        if len({tenant.name for tenant in self.tenants}) < len(self.tenants):
            raise ValueError("tenants: two have the same name")
        if self.warm_up_s < 0 or not 0 <= self.min_goodput <= 1:
            raise ValueError("warm_up_s: must not be negative; min_goodput: must be in 0..1")


def read_profile(name: str) -> Profile:
    """A profile by its name or its file. Raises ValueError that names the field, OSError without such a file."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else PROFILES / f"{name}.yaml"
    given = yaml.safe_load(path.read_text())
    if not isinstance(given, dict):
        raise ValueError(f"{path}: has to be a mapping")
    try:
        return _profile(path.stem, dict(given))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _profile(name: str, given: dict[str, Any]) -> Profile:
    tenants = tuple(_read(Tenant, f"tenants[{number}]", row) for number, row in enumerate(given.pop("tenants", ())))
    faults = _read(Faults, "faults", given.pop("faults")) if given.get("faults") else None
    stack = _read(Stack, "stack", given.pop("stack", {"targets": 2, "drafts": 2} if faults else {}))
    shape, slo = _shape(given.pop("shape", None)), _read(Slo, "slo", given.pop("slo", {}))
    own = {"name": name, "shape": shape, "slo": slo, "tenants": tenants, "faults": faults, "stack": stack}
    return _read(Profile, "profile", {**given, **own})


def _shape(given: Any) -> Shape:
    options = dict(given or {})
    kind = options.pop("kind", None)
    if kind not in SHAPES:
        raise ValueError(f"shape.kind: {kind!r} is not one of {', '.join(SHAPES)}")
    return _read(SHAPES[kind], "shape", options)


def _read(kind: type[T], where: str, given: Mapping[str, Any]) -> T:
    """An object of `kind` from YAML; lists become tuples. Raises ValueError that names the field."""
    known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: has to be a mapping")
    if unknown := given.keys() - known.keys():
        raise ValueError(f"{where}.{min(unknown)}: no such field")
    for name, one in known.items():
        if name not in given and one.init and one.default is MISSING and one.default_factory is MISSING:
            raise ValueError(f"{where}.{name}: is missing")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
