"""Parses an answer's growing text into reasoning, content and tool calls. Pure.

A piece of text takes work in proportion to its length, whatever came before it. Not here: the grammar that makes an
answer parse (`outrider.gateway.tools`). Begin with `tool_calls`; `formats` lists the ways to write calls.
"""
