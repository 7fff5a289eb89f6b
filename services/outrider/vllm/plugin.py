"""The plugin in `vllm serve`: `--scheduler-cls outrider.vllm.plugin.Scheduler`, told by `--additional-config`.

It is the scheduler of a target, with a feed in the place of the target's service.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from outrider.drafting.pool import Vocabulary
from outrider.drafting.source import make_sources
from outrider.engine import CheckpointError, tokenizer_fingerprint
from outrider.rpc.certificates import TlsFiles
from outrider.rpc.channel import connect_to
from outrider.rpc.roles import ClusterSecret, Role, credential
from outrider.vllm import versions
from outrider.vllm.coupling import EXTRA, extra_args
from outrider.vllm.feed import Feed
from outrider.vllm.fixed_drafts import Reach
from outrider.vllm.plugin_config import PluginConfig
from outrider.vllm.pool_thread import PoolThread
from outrider.vllm.scheduler import Scheduler as BaseScheduler

log = logging.getLogger(__name__)

WORKER = "outrider.vllm.worker.Worker"


class Scheduler(BaseScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError for settings under which it cannot draft, and for a configuration that is at fault."""
        super().__init__(*args, **kwargs)
        versions.check()
        config = PluginConfig.of(self.vllm_config.additional_config)
        self._check_settings()
        if config.row_price is not None:
            price = config.row_price
            self.book._row_price = lambda cost: price
        pool = PoolThread(_reach(config, self.vllm_config.model_config)) if config.drafts else None
        self.feed = Feed(self.book, config, self.num_spec_tokens, pool, make_sources(config.lookups))
        self.before_step = self.feed.before_step

    def add_request(self, request: Any) -> None:
        _forget_ours(request)
        super().add_request(request)
        try:
            self.feed.open(request)
        except Exception:
            # Not `_safely`: whoever sends such a request must not end the drafts of others.
            log.exception("request %r is decoded plainly", request.request_id)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        self._safely(self.feed.follow)
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        self._safely(self.feed.follow)
        return finished

    def shutdown(self) -> None:
        self.feed.stop()
        super().shutdown()

    def _check_settings(self) -> None:
        if self.vllm_config.parallel_config.worker_cls != WORKER:
            raise ValueError(f"worker_cls: must be {WORKER}: without it seeded texts would depend on drafts")
        if self.dynamic_sd_lookup is None:
            raise ValueError(
                "speculative_config.num_speculative_tokens_per_batch_size: needed, as [[1, MAX_NUM_SEQS, "
                "NUM_SPECULATIVE_TOKENS]]: without it vLLM pads new requests with drafts of -1"
            )


def _forget_ours(request: Any) -> None:
    """Drops what only a target tells its worker: here it could come from a client."""
    if EXTRA in (given := extra_args(request.sampling_params)):
        request.sampling_params.extra_args = {name: value for name, value in given.items() if name != EXTRA}


def _reach(config: PluginConfig, model: Any) -> Reach:
    """Raises ValueError, or OSError for files that cannot be read."""
    secret = ClusterSecret.read(config.secret_file) if config.secret_file else None
    tls = TlsFiles(Path(config.tls_dir)) if config.tls_dir else None
    return Reach(
        addresses=config.drafts,
        vocabulary=Vocabulary(model.get_vocab_size(), model.max_model_len),
        connect=connect_to(Role.DRAFT, tls),
        credential=credential(secret, Role.TARGET),
        tokenizer_fingerprint=_fingerprint(Path(model.tokenizer)),
    )


def _fingerprint(tokenizer: Path) -> str:
    """Empty for a tokenizer that is no directory on this machine, or that has another format."""
    try:
        return tokenizer_fingerprint(tokenizer) if tokenizer.is_dir() else ""
    except (CheckpointError, OSError, ValueError) as error:
        log.warning("the tokenizers of draft workers are not checked: %s", error)
        return ""
