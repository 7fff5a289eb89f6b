"""Parses an answer's growing text into reasoning, content and tool calls. Pure.

Not here: the grammar that makes an answer parse (`outrider.gateway.tools`). Begin with `tool_calls`.
"""
