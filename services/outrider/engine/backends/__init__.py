"""Implementations of a model's steps for one kind of device.

Not here: models through torch (`models/`). Begin with `cpu`.
"""
