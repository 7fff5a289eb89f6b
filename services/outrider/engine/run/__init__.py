"""One forward: what each sequence runs, the same laid out flat, and CUDA graphs of it.

Not here: what follows from the logits (`outrider.speculation`). Begin with `step`.
"""
