"""The connection to Redis: where it is, who may do what in it, and what an outage means for a call.

Not here: what is kept (`workers/`, `tenants/`, `plans`). Begin with `link`.
"""
