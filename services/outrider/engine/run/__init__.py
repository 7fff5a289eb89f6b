"""CUDA graphs of steps.

Not here: what a step is (`kv/step`), and what follows from the logits (`outrider.speculation`). Begin with `graphs`.
"""
