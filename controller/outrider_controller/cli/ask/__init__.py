"""Commands that ask a gateway for answers, and what they count and time of these.

Begin with `generate`; `demo` answers a prompt twice and compares.
"""
