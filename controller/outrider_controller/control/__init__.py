"""Control plane: the operators' API and the cluster's plan. Knows leases; not tokens.

Not here: which worker a request goes to (`router/`). Begin with `server`.
"""
