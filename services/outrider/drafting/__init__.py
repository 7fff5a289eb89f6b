"""Drafts on their way to verification: the sources that make trees, and one sequence's buffer of them.

Here: `source`, `buffer`, the pool of draft workers (`pool/`), lookups in the text (`lookup/`), and drafters' options.
Not here: the tree itself (`outrider.tree`), the engine, the target's steps, and what runs in a draft worker
(`outrider.drafters`). Begin with `source`.
"""
