"""Tools and structured output: the grammar that a request asks for, and how an answer is read back.

Pure. `parsers/` reads reasoning, content and calls out of a growing text. Not here: masks, which targets make. Begin
with `tools`, or with `structured` for grammars that clients write.
"""
