"""Implementations of a model's steps for one kind of device."""
