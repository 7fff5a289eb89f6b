"""Redis users, one for each role, with the commands and keys that each may use. Pure.

A script needs write access to all its declared keys, even if it only reads them. So a role that reads leases by a
script may also write them. Drafts are trusted least and read no other leases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

_COMMANDS = (
    *("ping", "time", "select", "client|setinfo", "multi", "exec", "eval", "get", "getex", "set", "del", "exists"),
    *("strlen", "expire", "pexpire", "pttl", "sadd", "srem", "smembers", "smismember", "hget", "hset", "hmget"),
    *("hgetall", "hdel", "zadd", "zrangebyscore", "zremrangebyscore", "xadd"),
)
_OF_CONTROL = ("expireat", "zrem", "zcard", "zrangebylex", "xrange", "xread", "xrevrange")


def _own(role: str) -> tuple[str, ...]:
    """The role's own leases and prefix index, and the events, which it may only write."""
    return f"lease:{role}:*", f"workers:{role}", f"prefix:{role}:*", "%W:events"


def _leases_of(role: str) -> tuple[str, ...]:
    return f"lease:{role}:*", f"workers:{role}", "cordon:*"


KEYS: Mapping[str, tuple[str, ...]] = {
    "draft": _own("draft"),
    "target": (*_own("target"), *_leases_of("draft"), "erasures", "samplevolumes"),
    "gateway": (
        *_own("gateway"),
        *_leases_of("gateway"),
        *_leases_of("router"),
        *("keysrequired", "apikey:*", "tenant:*", "quota:*", "running:*"),
    ),
    "router": (*_own("router"), *_leases_of("*"), "prefix:*", "ledgers", "ledger:*"),
    "control": ("*",),
}
"""Keys by role, without the namespace; `%W` is write only. A controller (router and control plane) uses "control"."""


def users(passwords: Mapping[str, str], namespace: str = "outrider") -> str:
    """An ACL file. `passwords`: by role; the file has their SHA-256. No other user has any access."""
    lines = [_user(role, password, namespace) for role, password in passwords.items()]
    return "\n".join(["user default off", *lines]) + "\n"


def _user(role: str, password: str, namespace: str) -> str:
    commands = [f"+{name}" for name in (*_COMMANDS, *(_OF_CONTROL if role == "control" else ()))]
    keys = [
        f"%W~{namespace}:{key.removeprefix('%W:')}" if key.startswith("%W:") else f"~{namespace}:{key}"
        for key in dict.fromkeys(KEYS[role])
    ]
    digest = hashlib.sha256(password.encode()).hexdigest()
    return " ".join([f"user {role} on #{digest} resetchannels -@all", *commands, *keys])
