"""Commands about drafts: plan, distill, compare, the rollout of a new version, and the autopilot of these.

The work itself is in `outrider.training` and `outrider.comparison`. Begin with `distill`.
"""
