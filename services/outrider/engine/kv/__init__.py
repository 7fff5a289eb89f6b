"""The paged KV cache: blocks, who has which, and the prefixes that others may find.

Not here: attention over it (`attention/`). Begin with `kv_cache_manager`.
"""
