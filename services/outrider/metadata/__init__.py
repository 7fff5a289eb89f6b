"""What the processes know of one another, kept in Redis: leases, prefix index, events. Never weights, KV or text.

Redis away means less (no affinity, the last known workers), not an outage: nothing here raises because of it, and no
request that can be answered without it waits for it longer than 50 ms. Only this package imports redis, and only once
a URL is given.
"""

from outrider.metadata.directory import LeaseRecord
from outrider.metadata.events import Event
from outrider.metadata.lease import Lease
from outrider.metadata.store import MetadataStore

__all__ = ["Event", "Lease", "LeaseRecord", "MetadataStore"]
