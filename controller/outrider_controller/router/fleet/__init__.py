"""The workers that this router knows, their loads, and which of them a request goes to.

Not here: where a request is open (`requests/sequences.py`), and whether a draft pays (`speculation/`). Begin with
`placement`.
"""
