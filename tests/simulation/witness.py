"""Checks every message: commits are the target's text, each position comes once, and nothing follows the end. Also
keeps past messages, so that they can be sent again.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.speculation import SamplingParams, VerificationMode

from tests.simulation import hash_model
from tests.simulation.hostility import DRAFT_PATH, TARGET_PATH
from tests.simulation.network import Stream
from tests.simulation.schedule import RequestPlan

ROUTE_PATH = "/outrider.rpc.v1.RouterService/RouteMany"
_DRAWN = re.compile(r'(request_id:) "[0-9a-f]{32}"|(?<!\S)((?:seed|call_id|cancelled):) \d{12,}')
Key = tuple[tuple[int, ...], float, int, int]
"""Prompt, temperature, top_k, seed: these determine the text."""


class Texts:
    """The model's text for each request, computed as far as it was needed."""

    def __init__(self, requests: Sequence[RequestPlan]) -> None:
        self._texts: dict[Key, list[int]] = {key_of(request): [] for request in requests}

    def add(self, request: RequestPlan) -> None:
        self._texts[key_of(request)] = []

    def text(self, key: Key, count: int) -> list[int] | None:
        """Its first `count` tokens; None for an unknown request."""
        known = self._texts.get(key)
        if known is None:
            return None
        if len(known) < count:
            prompt, temperature, top_k, seed = key
            params = SamplingParams(temperature=temperature, top_k=top_k, seed=seed)
            # With top_k 1 all modes choose the greedy token.
            mode = VerificationMode.COUPLED if temperature and top_k != 1 else VerificationMode.GREEDY
            known += hash_model.text((*prompt, *known), count - len(known), params, mode)
        return known[:count]


def key_of(request: RequestPlan) -> Key:
    return _key(request.prompt, request.temperature, request.top_k, request.seed or 0)


def _key(prompt: Sequence[int], temperature: float, top_k: int, seed: int) -> Key:
    drawn = temperature > 0 and top_k != 1
    return tuple(prompt), round(temperature, 4), top_k, seed if drawn else 0


class Witness:
    """The network's `observe` hook."""

    def __init__(self, texts: Texts, note: Callable[[str], None] | None, close_within_s: float | None) -> None:
        """`close_within_s`: longest time after a client left for which its target may still send commits. None where a
        fault may delay the close."""
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self._texts = texts
        self._note = note
        self.replaying = False
        self._close_within_s = close_within_s
        self._num_calls: Counter[Key] = Counter()
        self._left_s: dict[Key, float] = {}
        self._past: dict[tuple[str, str], deque[Any]] = {}

    def __call__(self, stream: Stream, to_server: bool, message: Any) -> None:
        if self._note is not None:
            self._note(_line(stream, to_server, message))
        if stream.path == TARGET_PATH:
            self._open(stream, message) if to_server else self._committed(stream, message)
        elif stream.path == ROUTE_PATH:
            self._called(stream, message) if to_server else self._answered(stream, message)
        elif stream.path == DRAFT_PATH and to_server:
            self._count_openings(stream, message)
        if not to_server and stream.server is not None and not self.replaying:
            past = self._past.setdefault((stream.server.name.rsplit("-", 1)[0], stream.path), deque(maxlen=8))
            past.append((stream, message.SerializeToString(), type(message)))

    def past(self, place: str, path: str, now: Stream) -> list[Any]:
        """Messages from `place` on earlier streams."""
        said = self._past.get((place, path), ())
        return [kind.FromString(data) for stream, data, kind in said if stream.broken and stream is not now]

    def _fail(self, what: str) -> None:
        self.violations.append(what)

    # -- router and target

    def _open(self, stream: Stream, message: Any) -> None:
        for opening in message.opens:
            at = len(opening.committed_token_ids)
            sampling = opening.sampling
            key = _key(opening.prompt_token_ids, sampling.temperature, sampling.top_k, sampling.seed)
            self._check(key, 0, opening.committed_token_ids, "an opening's committed tokens")
            stream.facts[opening.sequence_id] = [key, at, opening.stopping, False]
            self.counts["openings"] += 1
            self.counts["openings with committed tokens"] += bool(at)

    def _committed(self, stream: Stream, message: Any) -> None:
        for commit in message.commits:
            if (open_here := stream.facts.get(commit.sequence_id)) is None:
                continue
            key, at, stopping, ended = open_here
            self._check_left(key)
            if ended:
                self._fail("a commit after the one that finished its sequence")
            if commit.base_len != len(key[0]) + at:
                self._fail(f"a commit at {commit.base_len} where {len(key[0]) + at} tokens were committed")
            self._check(key, at, commit.token_ids, "a commit")
            open_here[1] += len(commit.token_ids)
            open_here[3] = bool(commit.finish_reason)
            if commit.finish_reason != (right := _finish(commit.token_ids, open_here[1], stopping)):
                self._fail(f"a commit with finish reason {commit.finish_reason}, right is {right}")
            self._count(commit)

    def _count(self, commit: sequence.Commit) -> None:
        self.counts["rounds"] += 1
        self.counts["drafted"] += commit.num_drafted
        self.counts["accepted"] += commit.num_accepted
        self.counts["dropped"] += commit.num_dropped
        self.counts["committed"] += len(commit.token_ids)

    def _count_openings(self, stream: Stream, message: Any) -> None:
        self.counts["draft openings"] += len(message.opens)

    # -- gateway and router

    def _called(self, stream: Stream, message: Any) -> None:
        for call in message.calls:
            asked = call.request
            seed = asked.sampling.seed if asked.seeded else 0
            key = _key(asked.prompt_token_ids, asked.sampling.temperature, asked.sampling.top_k, seed)
            self._check(key, 0, asked.resume_token_ids, "the tokens resumed from")
            stream.facts[call.call_id] = [key, len(asked.resume_token_ids), False]
            self._num_calls[key] += 1
            self.counts["resumptions"] += bool(asked.resume_token_ids)

        for call_id in message.cancelled:
            self._left_s[stream.facts[call_id][0]] = asyncio.get_running_loop().time()

    def _check_left(self, key: Key) -> None:
        left_s = self._left_s.get(key)
        # Of two clients that ask for the same text, the other may still be there.
        if left_s is None or self._close_within_s is None or self._num_calls[key] > 1:
            return
        if (late_s := asyncio.get_running_loop().time() - left_s) > self._close_within_s:
            self._fail(f"a commit {late_s:.3f} s after the client had left")

    def _answered(self, stream: Stream, message: Any) -> None:
        for response in message.responses:
            call = stream.facts.get(response.call_id)
            if call is None:
                self._fail("a round of a call that was not made")
                continue
            key, at, ended = call
            if ended:
                self._fail("a round after the end of its call")
            self._check(key, at, response.token_ids, "a round")
            call[1] += len(response.token_ids)
            call[2] = bool(response.finish_reason)

    def _check(self, key: Key, at: int, token_ids: Sequence[int], what: str) -> None:
        if not token_ids:
            return
        right = self._texts.text(key, at + len(token_ids))
        if right is None:
            self._fail(f"{what}: belongs to no request")
        elif right[at:] != list(token_ids):
            self._fail(f"{what}: at output position {at} {list(token_ids)}, the target says {right[at:]}")


def _finish(token_ids: Sequence[int], num_output: int, stopping: sequence.Stopping) -> int:
    """The finish reason of a commit of these tokens, after which the output has `num_output` tokens."""
    stops = set(stopping.stop_token_ids)
    if stops.intersection(token_ids):
        return sequence.FINISH_REASON_STOP if not stops.intersection(token_ids[:-1]) else -1
    return sequence.FINISH_REASON_LENGTH if num_output >= stopping.max_new_tokens else 0


def _line(stream: Stream, to_server: bool, message: Any) -> str:
    server = stream.server.name if stream.server else "?"
    ends = (stream.client.name, server) if to_server else (server, stream.client.name)
    # Random labels and seeds have no effect here, and would make every log different.
    body = _DRAWN.sub("(drawn)", " ".join(str(message).split()))
    return f"{ends[0]} → {ends[1]}: {body}"
