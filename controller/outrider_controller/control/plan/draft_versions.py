"""The registry of draft versions: the leading control plane adds each version that a draft worker's lease names, and
what is accepted of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from outrider.errors import InvalidRequest, NotFound, Unavailable
from outrider.metadata import LeaseRecord
from outrider.metadata.drafts import DraftStore
from outrider.metadata.workers.lease_check import MAX_TEXT_CHARS
from outrider.rpc.v1 import drafts_pb2 as drafts
from outrider.rpc.v1 import worker_pb2 as worker

from outrider_controller.autoscaler.evidence import Evidence, EvidenceKey
from outrider_controller.control.plan.left_out import leaving_out
from outrider_controller.plan_messages import draft_version


class DraftVersions:
    """All versions, by name. Only the leader writes them."""

    def __init__(self, store: DraftStore, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._known: dict[str, drafts.DraftVersion] = {}
        self._unsaved: set[str] = set()

    async def resume(self) -> None:
        """Continues from the former leader's. Raises Unavailable."""
        self._known = {one.version: one for one in await self._store.versions()}
        self._unsaved = set()

    def lost(self) -> None:
        """The store has lost its data: all are written again."""
        self._unsaved = set(self._known)

    def see(self, workers: Collection[LeaseRecord]) -> None:
        """All live draft workers."""
        for info in (one.info for one in workers):
            with leaving_out(f"draft worker {info.worker_id}"):
                self._see(info)

    def _see(self, info: worker.WorkerInfo) -> None:
        version = draft_version(info)
        known = self._known.setdefault(version, drafts.DraftVersion())
        before = known.SerializeToString(deterministic=True)
        if not known.version:
            known.CopyFrom(self._new(version, info))
        known.candidate = info.candidate
        if known.SerializeToString(deterministic=True) != before:
            self._unsaved.add(version)

    def learn(self, evidence: Mapping[EvidenceKey, Evidence]) -> None:
        for key, news in evidence.items():
            if (known := self._known.get(key.draft)) is not None and news.verified:
                known.num_verified += news.verified
                known.num_accepted += news.accepted
                self._unsaved.add(key.draft)

    async def save(self, epoch: int) -> None:
        """In a store in which `epoch` leads. What an operator has deleted there is forgotten."""
        saving, self._unsaved = self._unsaved, set()
        if not await self._store.put_versions({version: self._known[version] for version in saving}):
            self._unsaved |= saving
            return
        with suppress(Unavailable):
            stored = {one.version for one in await self._store.versions(epoch)}
            self._known = {version: one for version, one in self._known.items() if version in stored}

    def _new(self, version: str, info: worker.WorkerInfo) -> drafts.DraftVersion:
        return drafts.DraftVersion(
            version=version,
            name=info.model,
            revision=info.model_revision,
            kind=info.draft_kind,
            recipe=info.recipe,
            parent_revision=_parent(info.recipe),
            first_seen_unix_ms=round(self._clock() * 1000),
            candidate=info.candidate,
        )


def _parent(recipe: str) -> str:
    with suppress(ValueError, RecursionError):
        found = json.loads(recipe)
        parent = found.get("parent_revision") if isinstance(found, dict) else None
        if isinstance(parent, str) and len(parent) <= MAX_TEXT_CHARS and parent.isprintable():
            return parent
    return ""


def named(draft: str, versions: Collection[drafts.DraftVersion]) -> drafts.DraftVersion:
    """The version that an operator means. Raises NotFound, and InvalidRequest if there are several."""
    found = [one for one in versions if one.version == draft] or [
        one for one in versions if one.name == draft or ("@" in draft and one.version.startswith(draft))
    ]
    if not found:
        raise NotFound(f"no draft {draft[:200]!r} was seen", reason="UNKNOWN_DRAFT", field="draft")
    if len(found) > 1:
        listed = ", ".join(sorted(one.version for one in found)[:4])
        raise InvalidRequest("draft", f"{draft[:200]!r} are {len(found)} versions, name one: {listed}")
    return found[0]
