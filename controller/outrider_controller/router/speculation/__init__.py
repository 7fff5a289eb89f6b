"""How each request speculates: its draft length, its longest wait, its drafts.

Here: the decision for one request, the bounds on it, the plan that the router follows, and how changes reach targets.
Not here: how the plan is made (`outrider_controller.control.plan`). Begin with `controller`.
"""
