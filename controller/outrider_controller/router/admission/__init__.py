"""Who may start now: the places of a router and of its targets, divided over tenants.

Not here: which target has the place (`fleet/`), and the checks on what a client sent (`request/checks.py`). Begin with
`queue`.
"""
