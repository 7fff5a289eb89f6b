"""From a checkpoint to an engine: which execution, which precision, how much memory; and the files of drafts.

Not here: other files (`checkpoints/`), what a model is (`models/`), and a step (`run/`). Begin with `loader`.
"""
