"""Which cluster a command asks, and the calls to it: names, addresses, credentials, time limits.

Not here: what the commands ask (`show/`, `change/`), and a gateway's answers (`ask/`). Begin with `contexts`.
"""
