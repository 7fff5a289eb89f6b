"""`outrider up`: a whole stack on one machine, its processes watched and started again.

Not here: one process in the foreground (`foreground.py`), and stacks on other machines (`deploy/`). Begin with
`command`, then `stack`.
"""
