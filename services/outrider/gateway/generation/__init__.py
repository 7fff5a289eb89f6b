"""The one way of every request, whichever API it came by: admit, tokenise, route, detokenise, end.

Not here: how bodies are read and written (`http/`, `grpc/`, `vllm/`), and what a tool call looks like (`tools/`). Begin
with `generation`.
"""
