"""Requests from their opening to their finish.

Here: what a client may ask, the request itself, where it is open, and what becomes of it when a worker is lost. Not
here: who may start now (`admission/`), which worker (`fleet/`), with what draft length (`speculation/`). Begin with
`dispatcher`.
"""
