"""Parses an answer's growing text into reasoning, content and tool calls. Pure."""
