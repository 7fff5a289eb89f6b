"""Requests from their opening to their finish: where each is open, what it is sent, what follows when a worker is lost.

Not here: the request itself (`request/`), who may start now (`admission/`), which worker (`fleet/`), with what draft
length (`speculation/`). Begin with `dispatcher`.
"""
