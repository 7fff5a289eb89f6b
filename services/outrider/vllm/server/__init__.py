"""Drafts inside somebody's own `vllm serve`: what the plugin is told, which sources it has, and the link to a router.

The plugin itself is `outrider.vllm.plugin`, a name that users write. Not here: a target on vLLM (`target/`). Begin with
`feed`.
"""
