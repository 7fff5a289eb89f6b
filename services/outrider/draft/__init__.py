"""Draft worker: proposes continuations. Knows one draft and its sequences; not the target model, Ray or tenants.

Not here: how tokens are proposed (`outrider.drafters`). Begin with `worker`.
"""
