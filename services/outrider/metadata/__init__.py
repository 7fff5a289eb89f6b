"""Metadata shared by the processes in Redis: leases, prefix index, events. Never weights, KV blocks or text.

The cluster keeps serving while Redis is unreachable, without prefix affinity and with the last known workers. Nothing
here raises because of it, and a request that can be answered without Redis waits for it at most 50 ms. Only this
package imports redis, and only if a URL is given.

Begin with `store`.
"""

from outrider.metadata.events import Event
from outrider.metadata.store import MetadataStore
from outrider.metadata.workers.directory import LeaseRecord

__all__ = ["Event", "LeaseRecord", "MetadataStore"]
