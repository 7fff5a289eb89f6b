"""Whether, how far and with which draft each tenant speculates. Pure: no I/O, no threads; the clock is an argument.

Not here: how evidence is collected and decisions are sent (`control/plan/`). Begin with `plan`.
"""
