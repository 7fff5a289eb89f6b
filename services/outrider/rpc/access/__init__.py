"""Who may call what: certificates, roles, keys that were revoked.

Not here: how a tenant is found by its key (`outrider.gateway.tenants`). Begin with `roles`.
"""
