"""A target worker on vLLM: events in, vLLM's steps run, reports out.

Not here: the scheduler and the sampling that both uses of vLLM share (`outrider.vllm`). Begin with `machine`.
"""
