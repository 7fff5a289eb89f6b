"""Where a target's drafts come from: its own sources, its head, the pool of draft workers.

Not here: the sources themselves (`outrider.drafting`). Begin with `drafts`, or with `pool` for draft workers.
"""
