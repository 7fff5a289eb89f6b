"""The target worker: verifies drafts and commits the tokens of every sequence that it serves.

Knows the target model, its sequences, verification and its KV cache; not the drafts' workers, Ray or tenants' policy.

Not here: how logits are computed (`outrider.engine`). Begin with `service`.
"""
