"""The plugin in `vllm serve`: `--scheduler-cls outrider.vllm.plugin.Scheduler`, told by `--additional-config`.

It is the scheduler of a target, with a feed in the place of the target's service.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from outrider.drafting.source import make_sources
from outrider.engine import CheckpointError, tokenizer_fingerprint
from outrider.protocol.identity import own_info
from outrider.rpc.access.certificates import TlsFiles
from outrider.rpc.access.roles import ClusterSecret, Role, credential
from outrider.rpc.channel import connect_to
from outrider.rpc.v1 import worker_pb2
from outrider.target.drafts.drafts import Drafts
from outrider.target.requests.limits import Limits
from outrider.target.requests.report import TargetStats
from outrider.vllm.drafts import beyond_a_step
from outrider.vllm.scheduler import Scheduler as BaseScheduler
from outrider.vllm.server.feed import Feed
from outrider.vllm.server.fixed_drafts import Reach
from outrider.vllm.server.plugin_config import PluginConfig
from outrider.vllm.server.pool_thread import PoolThread
from outrider.vllm.server.router_link import RouterReach
from outrider.vllm.server.server_drafts import ServerDrafts

log = logging.getLogger(__name__)


class Scheduler(BaseScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError for settings under which it cannot draft, and for a configuration that is at fault."""
        super().__init__(*args, **kwargs)
        config = PluginConfig.of(self.vllm_config.additional_config)
        if config.row_price is not None:
            price = config.row_price
            self.book.price_of = lambda cost: price
        lookups = Drafts(make_sources(config.lookups), TargetStats(), self.book.calibration, beyond_a_step)
        make = partial(self._drafts, config, lookups.erase)
        pool = PoolThread(make) if config.drafts or config.routers else None
        self.feed = Feed(self.book, config, self.num_spec_tokens, pool, lookups, drafts_itself=bool(self.drafter))
        self._ended: list[str] = []
        """Requests that have ended since the feed was told."""
        self.asks_time = bool(config.routers)
        """Whether somebody goes by the time of steps."""
        self.before_step = self.feed.before_step

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        try:
            self.feed.open(request)
        except Exception:
            # Whoever sends such a request must not end the drafts of others.
            self.book.forget(request.request_id)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        followed = self.feed.followed
        found = [one for group in outputs.values() for one in group.outputs if one.request_id in followed]
        if found or self._ended or self.book.forgotten or self.asks_time:
            names, cached = [one.request_id for one in found], _cached(found) if self.asks_time else {}
            self._safely(lambda: self.feed.follow(self.step, self.verified, cached, self._touched(names)))
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        if self._ended:
            self._safely(lambda: self.feed.follow(names=self._touched([])))
        return finished

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._ended.append(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _touched(self, names: list[str]) -> list[str]:
        """With the requests that have ended, or whose drafting has."""
        found = [*names, *self._ended, *self.book.forgotten]
        self._ended, self.book.forgotten = [], []
        return found

    def shutdown(self) -> None:
        self.feed.stop()
        super().shutdown()

    def _drafts(
        self, config: PluginConfig, erase: Callable[[str], int], post: Callable[[list[Any]], None]
    ) -> ServerDrafts:
        """Raises ValueError, or OSError for files that cannot be read."""
        secret = ClusterSecret.read(config.secret_file) if config.secret_file else None
        tls = TlsFiles(Path(config.tls_dir), Role.TARGET) if config.tls_dir else None
        proof, info = credential(secret, Role.TARGET), self._info(config)
        reach = Reach(config.drafts, connect_to(Role.DRAFT, tls), proof, info.tokenizer_fingerprint)
        router = RouterReach(config.routers, connect_to(Role.ROUTER, tls), proof, info, self._load)
        limits = Limits(
            vocab_size=info.vocab_size,
            max_context_len=info.max_context_len,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_draft_tokens=self.num_spec_tokens,
        )
        return ServerDrafts(limits, reach, post, router if config.routers else None, erase)

    def _info(self, config: PluginConfig) -> worker_pb2.WorkerInfo:
        """This server as a target."""
        model, cache = self.vllm_config.model_config, self.vllm_config.cache_config
        named = model.served_model_name
        return own_info(
            worker_pb2.WORKER_ROLE_TARGET,
            model=named if isinstance(named, str) else named[0],
            engine="vllm",
            attached=True,
            tokenizer_fingerprint=_fingerprint(Path(model.tokenizer)),
            vocab_size=model.get_vocab_size(),
            max_context_len=model.max_model_len,
            max_draft_tokens=self.num_spec_tokens,
            tenant_draft_tokens=config.caps,
            max_sequences=self.max_num_running_reqs,
            block_size=self.block_size,
            num_blocks=cache.num_gpu_blocks or 0,
            device=current_platform.device_type,
            dtype=str(model.dtype).removeprefix("torch."),
        )

    def _load(self) -> worker_pb2.WorkerLoad:
        """As of now; called in another thread."""
        running, waiting, cost = len(self.running), len(self.waiting), self.book.cost
        return worker_pb2.WorkerLoad(
            num_running=running,
            num_waiting=waiting,
            num_sequences=running + waiting,
            num_free_blocks=self.kv_cache_manager.block_pool.get_num_free_blocks(),
            prefill_token_ns=round(cost.prompt_token_s * 1e9),
            row_ns=round(cost.row_s * 1e9),
        )


def _cached(outputs: Iterable[Any]) -> dict[str, int]:
    """Prompt tokens from the prefix cache, of the requests whose prompt has ended."""
    return {one.request_id: one.prefill_stats.num_cached_tokens for one in outputs if one.prefill_stats is not None}


def _fingerprint(tokenizer: Path) -> str:
    """Empty for a tokenizer that is no directory on this machine, or that has another format."""
    try:
        return tokenizer_fingerprint(tokenizer) if tokenizer.is_dir() else ""
    except (CheckpointError, OSError, ValueError) as error:
        log.warning("the tokenizers of draft workers are not checked: %s", error)
        return ""
