"""Checkpoints on disk: where they are, whether they may be read, and what their files say.

Here: fetching, hashes, GGUF, packed weights, tokenizers, distilled drafts. Not here: a model that runs (`models/`).
Begin with `checkpoints`.
"""
