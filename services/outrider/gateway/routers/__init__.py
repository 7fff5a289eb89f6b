"""The routers that this gateway knows: which one a request goes to, and the one stream to each.

Not here: when a request is sent again (`generation/retry.py`). Begin with `routers`.
"""
