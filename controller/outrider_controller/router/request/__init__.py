"""One request: its fields, checked once; what is known of it; and which worker was at fault when one is lost. Pure.

Not here: where it is open, and what becomes of it (`requests/`). Begin with `state`.
"""
