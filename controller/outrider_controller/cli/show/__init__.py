"""Commands that read a cluster: get, describe, top, events, trace, explain's figures.

They change nothing. Not here: how a result is printed (`output.py`). Begin with `get`.
"""
