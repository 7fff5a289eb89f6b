"""Who asks, and how much each may: keys, scopes, quotas, places.

Not here: tenants as operators write them (`outrider.metadata.tenants`), and which RPC needs what
(`outrider.rpc.roles`). Begin with `auth`.
"""
