"""The messages between processes: their bounds, checks and records. Opens no connection.

Not here: connections (`outrider.rpc`). Begin with `rounds`, the record of a step of one sequence.
"""
