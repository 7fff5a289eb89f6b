"""Timeouts of calls to Redis."""

CALL_TIMEOUT_S = 0.05
"""For calls that a request waits for and can continue without."""
BACKGROUND_TIMEOUT_S = 1.0
"""For calls that no request waits for: a slow answer is better than none. Longer than any round trip on Earth."""
