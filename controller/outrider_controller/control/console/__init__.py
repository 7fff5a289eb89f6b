"""The console: a page of the ops port, which reads only, and the text that it shows for tokens.

Not here: the figures themselves (`api/` and `plan/`). Begin with `page`; `static/` is what a browser loads.
"""
