"""Gateway: text, chat templates, OpenAI-compatible HTTP and the public gRPC API. Has no model weights.

Not here: which target answers, which a router decides. Begin with `generation`.
"""
