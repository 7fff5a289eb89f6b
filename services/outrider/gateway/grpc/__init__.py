"""The public gRPC API.

Not here: HTTP (`http/`), and vLLM's engine service for other gateways (`vllm/`). Begin with `service`.
"""
