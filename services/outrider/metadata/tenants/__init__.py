"""Tenants and their keys, quotas and usage, as Redis keeps them.

Every change is atomic. Not here: the checks on what operators write (the control plane's `api/`). Begin with `tenants`.
"""
