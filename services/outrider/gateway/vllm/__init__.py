"""The gateway as an engine behind other gateways: vLLM's gRPC engine service, for one of its models.

Not here: a target on vLLM (`outrider.vllm`). Begin with `service`.
"""
