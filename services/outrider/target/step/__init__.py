"""A step: which rows are run, what is verified, what is committed, and what it cost.

Owned by one thread; knows no network. Not here: how logits are computed (`outrider.engine`), and the rule of acceptance
(`outrider.speculation`). Begin with `worker`.
"""
