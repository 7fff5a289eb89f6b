"""outrider trace: requests, round by round.

Not here: how rounds are recorded (`router/observe/`). Begin with `command`.
"""
