"""Feeds a scheduler's book in `vllm serve`: opens its requests at the sources of drafts, offers what these propose, and
tells them of commits and ends. Runs on the thread that schedules; never waits.

Faults are raised: the scheduler then decodes the open requests plainly, and they are closed here by `follow`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from vllm.sampling_params import SamplingType

from outrider.drafting.source import CloseReason, DraftSource, Opening
from outrider.drafting.tree import DraftTree
from outrider.errors import InvalidRequest
from outrider.options.sampling import SamplingParams, VerificationMode
from outrider.protocol.sequence_key import SequenceKey
from outrider.protocol.validate import check_label
from outrider.target.opening import Speculation
from outrider.vllm.coupling import coupled_params, extra_args
from outrider.vllm.drafts import DraftBook
from outrider.vllm.plugin_config import MAX_DRAFT_TOKENS, TENANT, PluginConfig
from outrider.vllm.pool_thread import PoolThread


@dataclass(slots=True)
class _Fed:
    """One request that may have drafts."""

    key: SequenceKey
    request: Any
    told_len: int
    """Tokens that the sources know, the prompt included."""


class Feed:
    def __init__(
        self,
        book: DraftBook,
        config: PluginConfig,
        max_draft_tokens: int,
        pool: PoolThread | None,
        lookups: Sequence[DraftSource],
    ) -> None:
        """`max_draft_tokens`: what vLLM verifies in one step at most."""
        self.num_refused = 0
        """Drafts that fit no request."""
        self._book = book
        self._config = config
        self._max_draft_tokens = max_draft_tokens
        self._pool = pool
        self._lookups = lookups
        self._ids = count(1)
        self._open: dict[str, _Fed] = {}
        self._names: dict[SequenceKey, str] = {}
        """Request of each key."""

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: Any) -> None:
        """From now on the request has drafts, if its tenant may have any."""
        tenant = tenant_of(request)
        limit = min(self._config.cap_of(tenant), _asked(request), self._max_draft_tokens)
        if limit <= 0 or request.request_id in self._open or not _is_text(request):
            return
        speculation = Speculation(limit, run_ahead_tokens=self._config.run_ahead_tokens, max_own_draft_tokens=limit)
        # First what may fail.
        key, opening = SequenceKey(0, next(self._ids)), opening_of(request, speculation, tenant)
        self._open[request.request_id] = _Fed(key, request, request.num_tokens)
        self._names[key] = request.request_id
        self._book.open(request.request_id, request.all_token_ids, speculation, tenant)
        self._tell(lambda source: source.open(key, opening))

    def before_step(self) -> None:
        """Offers what has arrived."""
        if self._pool is not None:
            for key, found in self._pool.poll():
                self._offer(key, found)
        for source in self._lookups:
            for key, found in source.poll():
                self._put(key, found)

    def follow(self) -> None:
        """Tells the sources what the last step committed, and which requests have ended."""
        for request_id, fed in list(self._open.items()):
            if fed.request.is_finished() or request_id not in self._book:
                self._close(request_id, fed)
            elif fresh := list(fed.request.all_token_ids[fed.told_len :]):
                self._commit(fed, fresh)

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()

    def _commit(self, fed: _Fed, tokens: list[int]) -> None:
        key, base_len = fed.key, fed.told_len
        fed.told_len += len(tokens)
        self._tell(lambda source: source.commit(key, base_len, tokens))

    def _close(self, request_id: str, fed: _Fed) -> None:
        key = fed.key
        del self._open[request_id], self._names[key]
        self._book.close(request_id)
        self._tell(lambda source: source.close(key, CloseReason.FINISHED))

    def _tell(self, told: Callable[[Any], None]) -> None:
        if self._pool is not None:
            self._pool.tell(told)
        for source in self._lookups:
            told(source)

    def _offer(self, key: SequenceKey, found: object) -> None:
        try:
            if isinstance(found, DraftTree) and (request_id := self._names.get(key)) is not None:
                self._book.offer(request_id, found)
        except InvalidRequest:
            self.num_refused += 1

    def _put(self, key: SequenceKey, found: object) -> None:
        drafted = self._book.find(self._names.get(key, ""))
        if drafted is not None and isinstance(found, DraftTree):
            drafted.buffer.put(found, len(drafted.tokens), drafted.speculation.max_own_draft_tokens)


def tenant_of(request: Any) -> str:
    found = extra_args(request.sampling_params).get(TENANT, "")
    return found if isinstance(found, str) else ""


def _asked(request: Any) -> int:
    """The cap that the client asks for; without one, more than any other cap."""
    found = extra_args(request.sampling_params).get(MAX_DRAFT_TOKENS)
    return found if isinstance(found, int) else 1 << 30


def _is_text(request: Any) -> bool:
    """Whether a draft worker can know all that its next token follows from."""
    return bool(request.prompt_token_ids and request.sampling_params) and not request.mm_features and not request.resumable


def opening_of(request: Any, speculation: Speculation, tenant: str) -> Opening:
    params = request.sampling_params
    coupled = params.sampling_type == SamplingType.RANDOM_SEED
    return Opening(
        prompt=tuple(request.prompt_token_ids),
        # Of a text that is sampled without a seed the likeliest tokens are drafted.
        params=coupled_params(params) if coupled else SamplingParams(temperature=0.0),
        mode=VerificationMode.COUPLED if coupled else VerificationMode.GREEDY,
        limits=speculation.draft_limits(0.0),
        max_new_tokens=request.max_tokens,
        stop_token_ids=frozenset(params.all_stop_token_ids),
        salt=hashlib.sha256(f"{tenant}\0{request.cache_salt or ''}".encode(errors="backslashreplace")).digest()[:16],
        log_fields={"request_id": _label(request.request_id), "tenant": _label(tenant)},
    )


def _label(value: str) -> str:
    """For log lines of the draft worker, which refuses what could be mistaken there."""
    try:
        check_label("label", value)
    except InvalidRequest:
        return ""
    return value
