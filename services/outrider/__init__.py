"""Outrider: exact, disaggregated speculative decoding. The workers and the gateway."""
