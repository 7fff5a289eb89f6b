"""Control plane: the operators' API and the cluster's plan. Knows leases; not tokens."""
