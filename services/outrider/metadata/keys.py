"""Names of the Redis keys. All are in one namespace, so that a Redis can be shared."""

from __future__ import annotations

from outrider.rpc.v1 import worker_pb2

ROLES: tuple[worker_pb2.WorkerRole.ValueType, ...] = (
    worker_pb2.WORKER_ROLE_DRAFT,
    worker_pb2.WORKER_ROLE_TARGET,
    worker_pb2.WORKER_ROLE_ROUTER,
    worker_pb2.WORKER_ROLE_GATEWAY,
    worker_pb2.WORKER_ROLE_CONTROL,
)


def role_name(role: worker_pb2.WorkerRole.ValueType) -> str:
    """draft, target, … Raises ValueError for an unset or unknown role."""
    if role not in ROLES:
        raise ValueError(f"role: {role} is not a worker's role")
    return worker_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()


class Keys:
    def __init__(self, namespace: str = "outrider") -> None:
        self.namespace = namespace
        self.events = f"{namespace}:events"
        """Stream."""
        self.audit = f"{namespace}:audit"
        """Stream of operators' changes."""
        self.tenants = f"{namespace}:tenants"
        """Sorted set of all names, each with score 0, so in the order of their bytes."""
        self.api_keys = f"{namespace}:apikeys"
        """Sorted set of TENANT/ID of every API key, each with score 0."""
        self.api_key_digests = f"{namespace}:apikeyids"
        """Hash: id of an API key → its SHA-256 in hex."""
        self.keys_required = f"{namespace}:keysrequired"
        """Exists from the first API key on, permanently: revoking the last key does not make access free."""
        self.keys_required_known = self.api_key("")
        """Hash, once a control plane has used this store: without it, nobody knows whether keys were required before
        the store lost its data. A gateway's user may read it, as it may read keys."""
        self.leader = f"{namespace}:leader"
        """Id of the control plane that leads. Expires unless it is renewed."""
        self.leader_epoch = f"{namespace}:leaderepoch"
        """Counts leaders."""
        self.plan = f"{namespace}:plan"
        """Hash: TENANT/TARGET → a serialized TenantDecision; and `epoch`, that of the last writer."""
        self.overrides = f"{namespace}:overrides"
        """Hash: tenant → a serialized SpeculationOverride."""
        self.deleted_tenants = f"{namespace}:deletedtenants"
        """Set of names, until the leading control plane has dropped its evidence about them."""
        self.ledgers = f"{namespace}:ledgers"
        """Sorted set of HOUR:ROUTER of every ledger, each with its hour since 1970 as score."""
        self.erasures = f"{namespace}:erasures"
        """Kind/tenant → when it was ordered to be erased."""
        self.erased = f"{namespace}:erased"
        """Holder/kind/tenant → the order that it has obeyed."""
        self.sample_volumes = f"{namespace}:samplevolumes"
        """Id → where it is."""
        self.drafts = f"{namespace}:drafts"
        """Hash: version of a draft → a serialized DraftVersion."""
        self.rollouts = f"{namespace}:rollouts"
        """Hash: version of a draft → a serialized Rollout."""
        self.rollout_evidence = f"{namespace}:rolloutevidence"
        """Hash: version of a draft → a serialized RolloutEvidence."""

    def tenant(self, name: str) -> str:
        """Hash: `record`, a serialized Tenant; `version`, which counts its changes; and `id`, from its creation."""
        return f"{self.namespace}:tenant:{name}"

    def api_key(self, digest_hex: str) -> str:
        """Hash: `tenant`, and `record`, a serialized ApiKey. Expires a day after the key."""
        return f"{self.namespace}:apikey:{digest_hex}"

    def quota(self, tenant: str) -> str:
        """Hash: the rest of the tenant's quota of `requests` and `tokens`, and `at`, the time of that in seconds."""
        return f"{self.namespace}:quota:{tenant}"

    def running(self, tenant: str) -> str:
        """Hash: gateway → number of the tenant's running requests there, and the second when that expires."""
        return f"{self.namespace}:running:{tenant}"

    def ledger(self, hour: int, router_id: str) -> str:
        """Hash: TENANT/FIELD → this router's sum in that hour. Expires 90 days after the last write."""
        return f"{self.namespace}:ledger:{hour}:{router_id}"

    def workers(self, role: worker_pb2.WorkerRole.ValueType) -> str:
        """Set of the ids that have, or recently had, a lease."""
        return f"{self.namespace}:workers:{role_name(role)}"

    def lease(self, role: worker_pb2.WorkerRole.ValueType, worker_id: str) -> str:
        """A serialized WorkerStatus, which expires; empty after it was given back."""
        return f"{self.namespace}:lease:{role_name(role)}:{worker_id}"

    def cordon(self, worker_id: str) -> str:
        """A serialized Cordon. It outlives the worker's lease by a day."""
        return f"{self.namespace}:cordon:{worker_id}"

    def prefix(self, role: worker_pb2.WorkerRole.ValueType, worker_id: str) -> str:
        """Set of block hashes. It expires with the lease."""
        return f"{self.namespace}:prefix:{role_name(role)}:{worker_id}"
