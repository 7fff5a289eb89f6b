"""Commands that change a cluster, or make what it needs: apply, set, create, delete, cordon, drain.

Not here: what may be written, which the control plane checks. Begin with `tenants`.
"""
