"""Commands about drafts: plan, distill, compare, and the rollout of a new version.

The work itself is in `outrider.training` and `outrider.comparison`. Begin with `distill`.
"""
