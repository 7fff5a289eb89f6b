"""Gateway: text, chat templates, OpenAI-compatible HTTP and the public gRPC API. Knows no rounds and no weights."""
