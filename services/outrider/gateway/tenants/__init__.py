"""Who asks, and how much each may: keys, scopes, quotas, places.

Not here: tenants as operators write them (`outrider.metadata.tenants.tenants`), and which RPC needs what
(`outrider.rpc.access.roles`). Begin with `auth`.
"""
