"""Locust's users: one class per tenant of a profile. Each user has its own connection."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gevent import GreenletExit
from locust import User, task

from benchmarks.support.prompts import Prompt
from loadtest.clients import CLIENTS, Client, ask
from loadtest.outcomes import Outcome
from loadtest.settings import Profile, Tenant


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of the stack."""

    http: str
    grpc: str
    model: str
    control: str = ""
    """Empty: no workers can be killed."""


class TenantUser(User):
    """Repeats request and pause. A subclass sets the tenant."""

    abstract = True
    tenant: Tenant
    prompts: Sequence[Prompt]
    endpoints: Endpoints
    record: Callable[[Outcome], None]

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        key = os.environ.get(self.tenant.api_key_env, "") if self.tenant.api_key_env else ""
        protocol = self.tenant.protocol
        address = self.endpoints.http if protocol == "http" else self.endpoints.grpc
        self._client: Client = CLIENTS[protocol](address, self.endpoints.model, key)

    def wait_time(self) -> float:
        return random.uniform(*self.tenant.wait_s)

    def on_stop(self) -> None:
        self._client.close()

    @task
    def answer(self) -> None:
        sent_s = time.time()
        try:
            outcome = ask(self._client, self.tenant, random.choice(self.prompts).text)
        except GreenletExit:
            # Locust waits for users at the end, and then kills those that are left.
            self._done(Outcome(self.tenant.name, sent_s, error="no end of the answer by the end of the test"))
            raise
        self._done(outcome)

    def _done(self, outcome: Outcome) -> None:
        type(self).record(outcome)
        self.environment.events.request.fire(
            request_type=self.tenant.protocol,
            name=self.tenant.name,
            response_time=outcome.e2e_ms,
            response_length=outcome.completion_tokens,
            exception=RuntimeError(outcome.error) if outcome.error else None,
            context={},
        )
        if not outcome.error:
            self._log("first token", outcome.ttft_ms)
            for gap_ms in outcome.itl_ms:
                self._log("inter-token", gap_ms)

    def _log(self, what: str, milliseconds: float) -> None:
        """A row of its own in Locust's report, which its totals leave out: they are of requests."""
        row = self.environment.stats.get(f"{self.tenant.name}: {what}", self.tenant.protocol)
        row.log(milliseconds, 0)


def user_classes(
    profile: Profile, prompts: Sequence[Prompt], endpoints: Endpoints, record: Callable[[Outcome], None]
) -> dict[str, type[TenantUser]]:
    """By class name. Raises ValueError for a tenant without its API key."""
    classes: dict[str, type[TenantUser]] = {}
    for number, tenant in enumerate(profile.tenants):
        own = [prompt for prompt in prompts if prompt.category in tenant.categories]
        # Prompts of a file without these categories are dealt out, so that tenants still differ in their text.
        own = own or list(prompts[number :: len(profile.tenants)] or prompts)
        if tenant.api_key_env and not os.environ.get(tenant.api_key_env):
            raise ValueError(f"tenants: {tenant.name} takes its API key from {tenant.api_key_env}, which is not set")
        name = f"{tenant.name.title().replace('-', '')}User"
        members = {
            "tenant": tenant,
            "prompts": own,
            "endpoints": endpoints,
            "record": staticmethod(record),
            "weight": tenant.weight,
            "abstract": False,
        }
        classes[name] = type(name, (TenantUser,), members)
    return classes
