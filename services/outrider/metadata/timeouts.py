"""How long anything may wait for Redis."""

CALL_TIMEOUT_S = 0.05
"""Where a request waits that can do without the answer."""
BACKGROUND_TIMEOUT_S = 1.0
"""Where nobody does: a slow answer is better than none. Longer than a round trip to the far side of the world."""
