"""From a checkpoint to a model that runs: which execution, which precision, how many positions.

Not here: files (`checkpoints/`), KV blocks (`kv/`), and a step (`run/`). Begin with `loader`.
"""
