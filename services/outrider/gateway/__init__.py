"""Gateway: text, chat templates, OpenAI-compatible HTTP and the public gRPC API. Has no model weights."""
