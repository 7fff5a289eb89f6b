"""The profile of a load test: a YAML file of `profiles/` as frozen dataclasses. Uses no Locust and no network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from loadtest.outcomes import Slo
from loadtest.shapes import Burst, Ramp, Steady, Threshold

PROFILES = Path(__file__).parent / "profiles"
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, config=_STRICT)
class Tenant:
    """A group of users with the same kind of requests."""

    name: str
    protocol: Literal["http", "grpc"] = "http"
    endpoint: Literal["chat/completions", "completions", "responses"] = "chat/completions"
    """Path in the HTTP API, below /v1."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of its HTTP requests, such as tools, response_format and logprobs."""
    weight: PositiveInt = 1
    """Weight of its users among all users."""
    categories: tuple[str, ...] = ()
    """Categories of the prompt file that it uses. If the file has none of them, tenants get its prompts in turn."""
    api_key_env: str = ""
    """Environment variable with its API key; empty: no key is sent."""
    max_tokens: PositiveInt = 64
    temperature: float = 0.0
    speculation: Literal["auto", "on", "off"] = "auto"
    wait_s: tuple[float, float] = (0.0, 0.0)
    """Pause of a user between requests, in seconds: uniform between these."""

    def __post_init__(self) -> None:
        if self.protocol != "http" and (self.body or self.endpoint != "chat/completions"):
            raise ValueError("endpoint, body: are for the protocol http")
        if not 0 <= self.wait_s[0] <= self.wait_s[1] < math.inf:
            raise ValueError("wait_s: must be two numbers, the least and the most")


@dataclass(frozen=True, slots=True, config=_STRICT)
class Faults:
    """Workers to kill during the test."""

    every_s: PositiveFloat
    roles: Annotated[tuple[Literal["target", "draft", "router"], ...], Field(min_length=1)] = ("draft", "target")
    """One worker of each in turn."""


@dataclass(frozen=True, slots=True, config=_STRICT)
class Stack:
    """Workers of the stack that is started for the test."""

    targets: PositiveInt = 1
    drafts: NonNegativeInt = 1


@dataclass(frozen=True, slots=True, config=_STRICT)
class Profile:
    name: str
    shape: Annotated[Steady | Ramp | Burst | Threshold, Field(discriminator="kind")]
    tenants: Annotated[tuple[Tenant, ...], Field(min_length=1)]
    slo: Slo = field(default_factory=Slo)
    warm_up_s: NonNegativeFloat = 0.0
    """Requests sent earlier are not counted."""
    min_goodput: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the requests, 0 to 1, that must meet the SLO for the test to pass."""
    faults: Faults | None = None
    stack: Stack = field(default_factory=Stack)
    """Given none, it has two of each with faults."""
    prompts: str = "prompts.jsonl"
    """A file that `read_prompts` can read; relative to this folder unless absolute."""

    def __post_init__(self) -> None:
        if len({tenant.name for tenant in self.tenants}) < len(self.tenants):
            raise ValueError("tenants: two have the same name")


_PROFILE = TypeAdapter(Profile)


def read_profile(name: str) -> Profile:
    """A profile by its name or its file. Raises ValueError that names the field, OSError without such a file."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else PROFILES / f"{name}.yaml"
    given = yaml.safe_load(path.read_text())
    if not isinstance(given, dict):
        raise ValueError(f"{path}: has to be a mapping")
    # A new request waits while a single target restarts.
    stack = {"targets": 2, "drafts": 2} if given.get("faults") else {}
    try:
        return _PROFILE.validate_python({"stack": stack, **given, "name": path.stem})
    except ValidationError as error:
        said = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise ValueError(f"{path}: {'; '.join(said)}") from None
