"""vLLM as the engine of a target: its scheduler and worker with drafts from outside, and a target worker around it.

vLLM is imported in here and nowhere else, so nothing but a process that runs it needs it. Begin with `scheduler.py`
and `drafts.py` (which tokens a step verifies) and `worker.py` (which are accepted). None of the three knows a router: a
target has them behind `target/`, and `vllm serve` behind `plugin.py` and `server/`.
"""
