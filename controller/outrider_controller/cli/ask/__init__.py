"""Commands that ask a gateway for answers, and what they count and time of these.

Not here: what is asked of the control plane (`show/`, `change/`). Begin with `generate`; `demo` answers a prompt twice
and compares.
"""
