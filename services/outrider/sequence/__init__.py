"""A sequence on its way from the gateway to an engine and to drafts: what it is, checked the same at every door.

Not here: what a process keeps while it runs one. Begin with `spec`.
"""
