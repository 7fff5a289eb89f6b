"""Control plane: the fleet as operators see it. Knows leases; not tokens."""
