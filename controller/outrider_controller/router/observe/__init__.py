"""What is recorded of requests: counters, traces, spans, usage. Never a token id.

Nothing is decided here, and a request waits for none of it. Begin with `telemetry`.
"""
