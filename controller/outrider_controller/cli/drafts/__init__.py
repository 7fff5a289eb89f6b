"""Commands about drafts before a cluster runs: plan, distill, compare.

The work itself is in `outrider.training` and `outrider.comparison`. Begin with `distill`.
"""
