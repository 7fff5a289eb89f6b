"""The public gRPC API.

Not here: HTTP (`http/`). Begin with `service`.
"""
