"""Small real models, for our tests and for yours.

Not here: fakes of our own tests. Begin with `tiny`.
"""
