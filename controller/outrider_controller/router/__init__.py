"""Router: carries requests from start to end. Knows token ids, targets and drafts; not text, weights or Ray.

Not here: which tenant speculates, which the control plane plans. Begin with `requests`.
"""
