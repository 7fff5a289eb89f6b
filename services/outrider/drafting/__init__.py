"""Drafts on their way to verification: the tree, the sources that make trees, and one sequence's buffer of them.

Here: `tree`, `source`, `buffer`, the pool of draft workers (`pool/`), lookups in the text (`lookup/`), and drafters'
options. Not here: the engine, the target's steps, and what runs in a draft worker (`outrider.drafters`). Begin with
`tree`.
"""
