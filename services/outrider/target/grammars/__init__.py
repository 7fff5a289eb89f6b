"""Structured output: grammars of one model's vocabulary, and where each sequence is in its own.

Not here: how clients ask for a grammar (`outrider.gateway.tools`), and where its masks are applied
(`outrider.speculation`). Begin with `grammar`.
"""
