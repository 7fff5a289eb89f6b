"""What a model is to the engine: the decoder and its executions, what they need of memory, how many positions.

Not here: how they are loaded (`loading/`), files (`checkpoints/`), KV blocks (`kv/`), and a step (`run/`). Begin with
`decoder`.
"""
