"""Outrider: exact, disaggregated speculative decoding. The workers and the gateway.

Here: everything but router, control plane and commands, which are `outrider_controller`. Begin with `target`, or with
`gateway` for what clients meet; `local` is all of it in one process.
"""
