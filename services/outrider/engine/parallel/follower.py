"""A follower: loads its share, then runs what rank 0 runs. It has no scheduler and keeps no logits."""

from __future__ import annotations

import logging
from dataclasses import replace

from outrider.engine.config import EngineConfig
from outrider.engine.loader import load_engine
from outrider.engine.parallel.group import Group, LoadOrder
from outrider.engine.parallel.links import Kind
from outrider.engine.parallel.plan import decode

log = logging.getLogger(__name__)


def follow(group: Group, config: EngineConfig) -> None:
    """Returns when rank 0 sends the end of the group.

    Raises PeerGone when rank 0 ends without that message, CheckpointError when the share cannot be loaded.
    """
    [link] = group.links
    kind, payload = link.receive()
    if kind is Kind.LOAD:
        order = LoadOrder.decode(payload)
        engine = load_engine(order.path, replace(config, num_blocks=order.num_blocks), group)
        log.info("rank %d of %d has loaded its share", group.rank, group.size)
        while (message := link.receive())[0] is Kind.STEP:
            engine.run(decode(message[1]))
    group.watchdog.disarm()
