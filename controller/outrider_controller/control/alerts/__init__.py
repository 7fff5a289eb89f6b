"""Alerts: which are active (`active`), and where they are sent (`report`).

Not here: the rules of Prometheus, which are in `deploy/`. Begin with `active`.
"""
