"""The target worker: owns the truth about every sequence it serves.

Knows the target model, its sequences, verification and its KV cache; not the drafts' workers, Ray or tenants' policy.
"""
