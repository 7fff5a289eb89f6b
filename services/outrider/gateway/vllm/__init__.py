"""The gateway as an engine behind others: vLLM's gRPC engine service, for one of its models."""
