"""The live workers: leases, cordons, and the prefixes that each has in its cache.

Not here: which of them a request goes to (the router's `fleet/`). Begin with `lease`.
"""
